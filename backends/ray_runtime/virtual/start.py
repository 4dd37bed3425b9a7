"""The actors of a virtual run: workers that stand for ranks, and queues, control and fabric between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray

from rlflow.backends.ray_runtime.run_control import RunControl
from rlflow.backends.ray_runtime.start_ranks import Started, StartedRank, start_queues
from rlflow.backends.ray_runtime.virtual.actor import VirtualActor
from rlflow.backends.ray_runtime.virtual.crew import crew
from rlflow.backends.ray_runtime.virtual.fabric import Fabric
from rlflow.backends.ray_runtime.virtual.settings import (
    VirtualSettings,
    WorkerSettings,
    payload_share,
    speed_up_of,
    times_of,
)
from rlflow.plan import Plan, Pool

if TYPE_CHECKING:
    from rlflow.backends.ray_runtime.start_ranks import StartSettings

_MANY = 100_000
"""Calls that may wait in an actor at once."""


def start_virtual(plan: Plan, pools: Sequence[Pool], virtual: VirtualSettings, settings: StartSettings) -> Started:
    """One actor per worker, pool after pool, and those that join the pools."""
    sizes = {pool.name: len(pool.ranks) for pool in pools}
    workers = crew(plan, pools, virtual)
    queues = start_queues(plan, sizes)
    control = ray.remote(num_cpus=0)(RunControl).remote(1)
    fabric = ray.remote(num_cpus=0, max_concurrency=_MANY)(Fabric).remote(float(plan.collective_timeout_s))
    remote = ray.remote(num_cpus=0, concurrency_groups={"control": 1, "rewards": 1})(VirtualActor)
    speed_up, epoch = speed_up_of(plan, virtual, times_of(plan, virtual)), time.time()
    ranks = []
    for pool, parts in workers.items():
        for member, part in enumerate(parts):
            told = WorkerSettings(
                plan_json=plan.to_json(),
                pool=pool,
                first=part.start,
                count=len(part),
                member=member,
                members={name: len(each) for name, each in workers.items()},
                sizes=sizes,
                run_dir=str(settings.run_dir.absolute()),
                seed=plan.seed if settings.seed is None else settings.seed,
                speed_up=speed_up,
                epoch=epoch,
                payload_share=payload_share(plan, virtual),
                settings=virtual,
                queues={q.id: queues[q.id] for q in plan.queues if pool in (q.source, q.target)},
                control=control,
                fabric=fabric,
            )
            ranks.append(StartedRank(pool, part.start, remote.remote(told)))
    return Started(ranks, list(queues.values()), control, sum(sizes.values()))
