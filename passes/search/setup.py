"""From a problem to the pieces the search works on: pool times by device type, and rules for partitions."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.passes.search.devices import pool_sizes
from rlflow.passes.search.options import StageTable
from rlflow.passes.search.partitions import Rules
from rlflow.passes.search.pool_time import PoolTimes
from rlflow.passes.search.problem import Problem


def times_of(problem: Problem) -> tuple[PoolTimes, ...]:
    made: list[PoolTimes] = []
    for kind in problem.device_types:
        tables: list[StageTable | None] = []
        for stage in problem.stages:
            table = kind.tables.get(stage)
            legal = problem.pins.layouts.get(stage)
            tables.append(table if table is None or legal is None else table.where(legal))
        sizes = pool_sizes(kind.hosts) if kind.sizes is None else kind.sizes
        made.append(PoolTimes(problem.stages, tables, sizes, kind.swap_model, problem.reshard, problem.links))
    return tuple(made)


def rules_of(problem: Problem) -> Rules:
    position = {stage: i for i, stage in enumerate(problem.stages)}

    def groups(some: Sequence[Sequence[str]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(position[stage] for stage in stages) for stages in some)

    pins = problem.pins
    return Rules(
        homes={position[stage]: pool.name for pool in pins.pools for stage in pool.stages},
        together=groups(pins.together),
        apart=groups(pins.apart),
        declared={
            p.name: None if p.devices is None and p.device_type is None else (p.devices, p.device_type)
            for p in pins.pools
        },
        only_declared=pins.only_these_pools,
        alike=groups(pins.alike),
    )
