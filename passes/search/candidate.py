"""A complete placement: pools with their stages, devices and layouts, and its period."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from rlflow.passes.search.devices import Place
from rlflow.passes.search.options import StageOption
from rlflow.passes.search.partitions import Part
from rlflow.passes.search.pool_time import PoolPlan


@dataclass(frozen=True, slots=True)
class PlacedPool:
    """`name` is that of a declared pool, None for one that the search made."""

    name: str | None
    part: Part
    device_type: str
    plan: PoolPlan
    start: Place
    """Its first device; the others follow without a gap (`devices.slots`)."""

    @property
    def stages(self) -> tuple[str, ...]:
        return self.plan.stages

    @property
    def devices(self) -> int:
        return self.plan.devices


@dataclass(frozen=True, slots=True)
class Candidate:
    """`period` is what it is ranked by; `model_period` the one of the tables, before any refinement. Both in
    seconds."""

    pools: tuple[PlacedPool, ...]
    """In order of their first stages."""
    period: float
    model_period: float

    @property
    def devices(self) -> int:
        return sum(pool.devices for pool in self.pools)

    @property
    def partition(self) -> tuple[Part, ...]:
        return tuple(pool.part for pool in self.pools)

    @property
    def identity(self) -> Hashable:
        """Equal for the same plan."""
        return tuple((p.part, p.device_type, p.devices, p.plan.layouts) for p in self.pools)

    @property
    def key(self) -> tuple[float, int, int, tuple[tuple[int, ...], ...], tuple[str, ...], tuple[int, ...]]:
        """The order of candidates: period, devices, pools, then fixed."""
        return (
            self.period,
            self.devices,
            len(self.pools),
            tuple(part.stages for part in self.partition),
            tuple(pool.name or "" for pool in self.pools),
            tuple(pool.devices for pool in self.pools),
        )

    def pool_of(self, stage: str) -> PlacedPool:
        return next(pool for pool in self.pools if stage in pool.stages)

    def option_of(self, stage: str) -> StageOption:
        plan = self.pool_of(stage).plan
        return plan.choices[plan.stages.index(stage)]
