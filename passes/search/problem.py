"""What a placement search is asked: stages with their tables, devices, what users pinned, and how a period is
judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlflow.passes.search.candidate import Candidate
from rlflow.passes.search.joint import Swap, resident
from rlflow.passes.search.options import StageOption, StageTable
from rlflow.passes.search.pool_time import Links, Reshard, consecutive, no_reshard
from rlflow.passes.search.synchronous import PeriodModel

Refine = Callable[[Sequence[Candidate]], Sequence[float]]
"""Better periods of candidates, in the same order: a simulation with common random numbers. Infinite = refused."""


@dataclass(frozen=True, slots=True)
class DeviceType:
    """Devices of one type, and what every stage costs on them. Stages without a table cannot run here."""

    name: str
    hosts: tuple[int, ...]
    """Devices of each host, in the order in which pools may run over them."""
    memory_bytes: int
    tables: Mapping[str, StageTable]
    swap: Swap | None = None
    """None: what shares a pool stays resident."""

    sizes: tuple[int, ...] | None = None
    """Sizes of pools that are tried, increasing; None: `pool_sizes(hosts)`."""

    @property
    def devices(self) -> int:
        return sum(self.hosts)

    @property
    def swap_model(self) -> Swap:
        return resident(self.memory_bytes) if self.swap is None else self.swap


@dataclass(frozen=True, slots=True)
class PoolPin:
    """A declared pool. `stages` are those that must be on it; one without stages may take any, or stay empty."""

    name: str
    stages: tuple[str, ...] = ()
    devices: int | None = None
    device_type: str | None = None


@dataclass(frozen=True, slots=True)
class Pins:
    """What the search must keep."""

    pools: tuple[PoolPin, ...] = ()
    only_these_pools: bool = False
    together: tuple[tuple[str, ...], ...] = ()
    """Groups of stages that share a pool."""
    apart: tuple[tuple[str, ...], ...] = ()
    """Groups of stages of which no two share a pool."""
    layouts: Mapping[str, Callable[[StageOption], bool]] = field(default_factory=dict)
    """Stage to whether an option agrees with the parts of its layout that are given."""
    alike: tuple[tuple[str, ...], ...] = ()
    """Stages that may change places without changing any cost: plans that differ only so appear once."""


@dataclass(frozen=True, slots=True)
class Problem:
    """ValueError for names that nothing has, names given twice, and stages pinned to two pools."""

    stages: tuple[str, ...]
    """In the order in which a pool runs them."""
    device_types: tuple[DeviceType, ...]
    pins: Pins = field(default_factory=Pins)
    reshard: Reshard = no_reshard
    links: Links = consecutive
    period: PeriodModel | None = None
    """None: fully pipelined, the period is the time of the slowest pool."""
    top: int = 5
    """How many runners-up to report."""
    alternatives: bool = True
    """Whether to find the best plan with each decision changed."""
    refine: Refine | None = None
    refine_top: int = 50
    """How many candidates to refine."""
    tolerance: float = 0.0
    """Refining stops at (1 + tolerance) times the lower bound."""
    time_limit: float | None = None
    """Seconds after which the best so far is returned; None: never."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        pins = self.pins
        kinds = [kind.name for kind in self.device_types]
        pools = [pool.name for pool in pins.pools]
        homes = [stage for pool in pins.pools for stage in pool.stages]
        for what, names in (("stage", self.stages), ("device type", kinds), ("pool", pools), ("pinned stage", homes)):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what} given twice: {', '.join(twice)}")
        named = [*homes, *pins.layouts, *(s for some in (*pins.together, *pins.apart, *pins.alike) for s in some)]
        unknown = sorted(set(named) - set(self.stages))
        unknown += sorted({p.device_type for p in pins.pools if p.device_type is not None} - set(kinds))
        if unknown:
            raise ValueError(f"not in the problem: {', '.join(unknown)}")
        if not self.stages or not self.device_types:
            raise ValueError("a problem needs a stage and a device type")
