"""The machines a plan is for, and what a schedule asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.cluster import presets
from rlflow.diagnostics import Span

DEVICE_TYPES: dict[str, str] = {name: presets.torch_device(name) for name in presets.device_names()}
"""Device name in .rlflow files to torch device type: cpu, npu or cuda."""

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
    supernode: str | None = None
    """Name of the supernode that the host is part of; hosts of one share a scale-up network."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts of one device (SI units, in the key names); a fact that is not known is a KeyError."""
        return {} if self.device == "cpu" else presets.device(self.device)

    @property
    def torch_device(self) -> str:
        return DEVICE_TYPES[self.device]


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
    ep: int | None = None
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
