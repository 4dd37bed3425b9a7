"""The actors of a virtual run: workers that stand for ranks, and queues, control and fabric between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from rlflow.backends.ray_runtime.start_ranks import Started, StartedRank, named, start_control, start_queues
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
"""Calls that may wait in the fabric at once."""


def start_virtual(plan: Plan, pools: Sequence[Pool], virtual: VirtualSettings, settings: StartSettings) -> Started:
    """One actor per worker, pool after pool, and those that join the pools."""
    sizes = {pool.name: len(pool.ranks) for pool in pools}
    queues = start_queues(plan, sizes)
    control = start_control(1)
    fabric = ray.remote(num_cpus=0, max_concurrency=_MANY)(Fabric).remote(float(plan.collective_timeout_s))
    remote = ray.remote(num_cpus=0, concurrency_groups={"control": 1, "rewards": 1})(VirtualActor)
    seed = plan.seed if settings.seed is None else settings.seed
    ranks = []
    for told in workers_of(plan, pools, virtual, settings.run_dir, seed, time.time()):
        own = {q.id: queues[q.id] for q in plan.queues if told.pool in (q.source, q.target)}
        actor = remote.remote(replace(told, queues=own, control=control, fabric=fabric))
        identity = actor.identity.options(concurrency_group="control").remote()
        ranks.append(StartedRank(told.pool, told.first, actor, identity))
    return Started(ranks, named(queues), control, sum(sizes.values()), (fabric,))


def workers_of(
    plan: Plan, pools: Sequence[Pool], virtual: VirtualSettings, run_dir: Path, seed: int, epoch: float
) -> list[WorkerSettings]:
    """What every worker is told, beside the actors that join them. At `epoch` (seconds) the plan's clock starts."""
    crews = crew(plan, pools, virtual)
    return [
        WorkerSettings(
            plan_json=plan.to_json(),
            pool=pool,
            first=part.start,
            count=len(part),
            member=member,
            members={name: len(each) for name, each in crews.items()},
            sizes={each.name: len(each.ranks) for each in pools},
            run_dir=str(run_dir.absolute()),
            seed=seed,
            speed_up=speed_up_of(plan, virtual, times_of(plan, virtual)),
            epoch=epoch,
            payload_share=payload_share(plan, virtual),
            settings=virtual,
        )
        for pool, parts in crews.items()
        for member, part in enumerate(parts)
    ]
