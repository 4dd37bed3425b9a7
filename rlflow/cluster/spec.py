"""The machines a plan is for, and what a schedule asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from rlflow.cluster import presets
from rlflow.diagnostics import Span
from rlflow.values import dataclass

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
        """Its torch device type: cpu, npu or cuda."""
        return presets.torch_device(self.device)


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
    """`device`: the kind of its devices, None = the cluster's first that is free. `memory_bytes`: what stages may use
    of one device, None = all but a reserve. `swap`: whether objects may move to the host's memory."""

    name: str
    devices: int
    span: Span | None = None
    device: str | None = None
    memory_bytes: int | None = None
    swap: bool = True
    host_of_rank: tuple[str, ...] = ()
    """The host of every rank, where that has been decided; empty = the first that are free."""


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """`nodes` are ids of stages; `pool` a requested pool, or `cpu` for Python stages; None = open. `also` are further
    pools that sample for the stages.

    The axes and the other settings of a layout are those of `rlflow.ir.flow.Layout`. `reshard`: whether weights that
    are trained on the same devices in another layout are laid out anew `in_place` or `beside` them.
    """

    nodes: tuple[str, ...]
    pool: str
    also: tuple[str, ...] = ()
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    cp: int | None = None
    etp: int | None = None
    vp: int | None = None
    split: tuple[int, ...] | None = None
    sp: bool | None = None
    zero: int | None = None
    recompute: str | None = None
    reshard: str | None = None
    workers: int | None = None
    span: Span | None = None
    settings: dict[str, Span] = field(default_factory=dict)
    """Where each setting was written."""


@dataclass(frozen=True, slots=True)
class StalenessRequest:
    """`burst`: admission only at every so many versions. `depth`: batches that may wait for training, None = the bound
    plus one."""

    model: str
    steps: int
    admit: str
    span: Span | None = None
    burst: int = 1
    depth: int | None = None


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
    auto: bool = True
    """Whether what is not pinned is left to the placement search."""


def local_cluster() -> Cluster:
    """This machine as a cluster of one host with one CPU device; more ranks come from a `pool` of more devices."""
    return Cluster(LOCAL, (Host(LOCAL, "cpu", 1),))
