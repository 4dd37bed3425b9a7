"""The machines a plan is for, and what a schedule asks of them. No costs yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlflow.diagnostics import Span

# Device name in .rlflow files -> torch device type.
DEVICE_TYPES: dict[str, str] = {
    "cpu": "cpu",
    "ascend_910b": "npu",
    "ascend_910c_die": "npu",
    "a100": "cuda",
    "h100": "cuda",
    "h800": "cuda",
    "h200": "cuda",
    "h20": "cuda",
}

LOCAL = "local"
"""Name of the cluster that stands for the machine rlflow runs on."""


@dataclass(frozen=True, slots=True)
class Host:
    """`devices` logical devices of one type; `memory_bytes` and `cpus` are of the host, None when not stated."""

    name: str
    device: str
    devices: int
    memory_bytes: int | None = None
    cpus: int | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    name: str
    hosts: tuple[Host, ...]
    span: Span | None = None

    @property
    def num_devices(self) -> int:
        return sum(host.devices for host in self.hosts)


@dataclass(frozen=True, slots=True)
class PoolRequest:
    name: str
    devices: int
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """`nodes` are ids of stages; `pool` a requested pool, or `cpu` for Python stages; axis sizes None = open."""

    nodes: tuple[str, ...]
    pool: str
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    workers: int | None = None
    span: Span | None = None
    settings: dict[str, Span] = field(default_factory=dict)
    """Where each setting was written."""


@dataclass(frozen=True, slots=True)
class StalenessRequest:
    model: str
    steps: int
    admit: str
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class TriggerRequest:
    node: str
    share: float
    carry: str
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the user pinned; everything else is open."""

    pools: tuple[PoolRequest, ...] = ()
    places: tuple[PlaceRequest, ...] = ()
    staleness: tuple[StalenessRequest, ...] = ()
    triggers: tuple[TriggerRequest, ...] = ()
    span: Span | None = None


def local_cluster() -> Cluster:
    """This machine as a cluster of one host with one CPU device; more ranks come from a `pool` of more devices."""
    return Cluster(LOCAL, (Host(LOCAL, "cpu", 1),))
