"""The ranks of all pools as Ray actors, with what joins the pools: the queues between them, and what they agree on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlflow.backends.ray_runtime.batch_queue import QueueActor, QueueSettings, readers_of
from rlflow.backends.ray_runtime.rank_actor import RankActor, RankSettings
from rlflow.backends.ray_runtime.run_control import RunControl
from rlflow.backends.ray_runtime.session import Reserved, device_resources
from rlflow.device_rules import worker_environment
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import Plan, Pool, Queue, SaveCheckpoint

_MORE_CALLS = 1000
"""Of a queue's actor at once, beside those of its ranks; Ray's own limit for everything."""


class StartSettings(Protocol):
    """What starting needs of a run's settings."""

    @property
    def base_dir(self) -> Path: ...
    @property
    def run_dir(self) -> Path: ...
    @property
    def seed(self) -> int | None: ...


@dataclass(frozen=True)
class StartedRank:
    """`rank` counts in its pool."""

    pool: str
    rank: int
    actor: Any

    def __str__(self) -> str:
        return f"rank {self.rank} of pool `{self.pool}`"


@dataclass(frozen=True)
class Started:
    """The actors of a run."""

    ranks: list[StartedRank]
    queues: list[Any]
    control: Any
    """What the pools agree through; None for one pool."""
    devices: int
    """Of all pools."""


def runnable_pools(plan: Plan) -> list[Pool]:
    """The pools that execute instructions, in the order of the plan. RLF4003 for devices that this version lacks."""
    busy = {program.pool for program in plan.programs}
    pools = [pool for pool in plan.pools if pool.device != "functions" and pool.name in busy]
    for pool in pools:
        if pool.device not in ("cpu", "npu"):
            raise RunFailure(
                "RLF4003",
                f"this version runs on CPUs and NPUs, and pool `{pool.name}` is made of {pool.device} devices",
                help=("compile with `--cluster local` to run on this machine",),
            )
    return pools


def start_ranks(plan: Plan, pools: list[Pool], group: Reserved, settings: StartSettings) -> Started:
    """One actor per rank, pool after pool in rank order, and those that join the pools."""
    sizes = {pool.name: len(pool.ranks) for pool in pools}
    queues = start_queues(plan, sizes)
    savers = sum(any(isinstance(i, SaveCheckpoint) for i in program.step) for program in plan.programs)
    control = ray.remote(num_cpus=0)(RunControl).remote(max(savers, 1)) if len(pools) > 1 else None
    threads = max(1, (os.cpu_count() or 1) // sum(sizes.values()))
    remote = ray.remote(concurrency_groups={"control": 1, "rewards": 1})(RankActor)
    ranks = []
    for pool in pools:
        for place in pool.ranks:
            rank_settings = RankSettings(
                plan_json=plan.to_json(),
                pool=pool.name,
                rank=place.rank,
                pools=sizes,
                base_dir=str(settings.base_dir.absolute()),
                run_dir=str(settings.run_dir.absolute()),
                seed=plan.seed if settings.seed is None else settings.seed,
                threads=threads,
                environment=_environment(threads) | worker_environment(plan, pool, os.environ),
                deadline_s=plan.collective_timeout_s,
                queues={q.id: queues[q.id] for q in plan.queues if pool.name in (q.source, q.target)},
                control=control,
            )
            strategy = PlacementGroupSchedulingStrategy(
                group.group, placement_group_bundle_index=group.bundle_of[place.host]
            )
            options = {"num_cpus": 1, "resources": device_resources(pool), "scheduling_strategy": strategy}
            actor = remote.options(**options).remote(rank_settings)
            ranks.append(StartedRank(pool.name, place.rank, actor))
    return Started(ranks, list(queues.values()), control, len(ranks))


def start_queues(plan: Plan, sizes: dict[str, int]) -> dict[str, Any]:
    """An actor per queue, by its id; `sizes`: ranks of every pool."""
    return {queue.id: _queue(plan, queue, sizes) for queue in plan.queues}


def _queue(plan: Plan, queue: Queue, sizes: dict[str, int]) -> Any:
    settings = QueueSettings(
        queue.id,
        queue.capacity,
        parts=sizes[queue.source],
        readers=readers_of(queue, sizes[queue.target]),
        deadline_s=plan.collective_timeout_s,
    )
    # Every rank of the source may wait for room at once: readers must still get in.
    calls = 2 * (settings.parts + settings.readers) + _MORE_CALLS
    return ray.remote(num_cpus=0, max_concurrency=calls)(QueueActor).remote(settings)


def _environment(threads: int) -> dict[str, str]:
    """Environment of a rank. Ray would set one OpenMP thread per CPU it was promised, here 1."""
    names = ("HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **kept}
