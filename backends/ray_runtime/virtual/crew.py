"""Which worker stands for which ranks of a pool.

A plan may have a thousand ranks and this machine room for some dozens of processes. A worker stands for consecutive
ranks and does the control work of each of them; model-parallel replicas, which read a batch once for all their ranks,
are not divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from rlflow.backends.ray_runtime.dist_queue.edges import readers_of
from rlflow.backends.ray_runtime.virtual.settings import VirtualSettings
from rlflow.plan import Plan, Pool


def virtual_pools(plan: Plan) -> list[Pool]:
    """The pools that execute instructions, of whatever devices, in the order of the plan."""
    busy = {program.pool for program in plan.programs}
    return [pool for pool in plan.pools if pool.device != "functions" and pool.name in busy]


def crew(plan: Plan, pools: Sequence[Pool], settings: VirtualSettings) -> dict[str, list[range]]:
    """Pool to the ranks of each of its workers. Every pool has one worker at least, whatever the limit."""
    total = sum(len(pool.ranks) for pool in pools)
    found = {}
    for pool in pools:
        size = len(pool.ranks)
        if settings.ranks_per_worker is not None:
            each = settings.ranks_per_worker
        else:
            each = -(-size // max(1, settings.workers * size // total))
        block = replica(plan, pool)
        each = min(size, -(-each // block) * block)
        found[pool.name] = [range(first, min(first + each, size)) for first in range(0, size, each)]
    return found


def replica(plan: Plan, pool: Pool) -> int:
    """Ranks that read together, or hold a model together: of all queues and layouts of the pool the least multiple."""
    size = len(pool.ranks)
    blocks = [size // readers_of(queue, size) for queue in plan.queues if queue.target == pool.name]
    for stage in plan.stages:
        if stage.pool == pool.name and stage.layout is not None and size % stage.layout.dp == 0:
            blocks.append(size // stage.layout.dp)
    whole = 1
    for block in blocks:
        whole = whole * block // gcd(whole, block)
    return min(whole, size)
