"""Objective 2, few tokens (staleness 0 above all): the period is a cycle ratio that depends on all pools together.

The period of given pools is asked of a function, which must never grow when a stage or reshard gets faster (cycle
ratios never do: durations enter max-plus sums; Baccelli et al. 1992), and never be below the time of a pool.
`StepGraph` is the exact one for steps that start when the step before has ended; rlflow's token analysis is the one for
any number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlflow.passes.search.pool_time import PoolPlan

PeriodModel = Callable[[Sequence[PoolPlan]], float]
"""Seconds of a period, of pools that run their stages in turn."""


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One step at a time: the length of the longest path through stages and the orders of pools.

    `stages` are in step order, `edges` lead from earlier to later ones (ValueError otherwise). A pool runs its stages
    in step order; its reshards and its swap occupy it before the stage they are for. For series-parallel steps with a
    pool per stage this is the sum in series and the maximum in parallel.
    """

    stages: tuple[str, ...]
    edges: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        position = {stage: i for i, stage in enumerate(self.stages)}
        for source, target in self.edges:
            if position[source] >= position[target]:
                raise ValueError(f"edge from `{source}` to `{target}` leads backwards in step order")

    def __call__(self, pools: Sequence[PoolPlan]) -> float:
        place = {stage: (p, i) for p, plan in enumerate(pools) for i, stage in enumerate(plan.stages)}
        free = [plan.swap_seconds for plan in pools]
        ends: dict[str, float] = {}
        before: dict[str, list[str]] = {stage: [] for stage in self.stages}
        for source, target in self.edges:
            before[target].append(source)
        for stage in self.stages:
            pool, index = place[stage]
            ready = free[pool] + pools[pool].reshard_seconds[index]
            for source in before[stage]:
                ready = max(ready, ends[source])
            ends[stage] = free[pool] = ready + pools[pool].choices[index].seconds
        return max(ends.values(), default=0.0)
