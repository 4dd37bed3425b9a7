"""The ranks of all pools as Ray actors, with what joins the pools: the queues between them, and what they agree on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlflow.backends.ray_runtime.deliveries import stale_samplers
from rlflow.backends.ray_runtime.dist_queue.client import start_queue
from rlflow.backends.ray_runtime.dist_queue.edges import edge_of
from rlflow.backends.ray_runtime.rank_actor import RankActor, RankSettings
from rlflow.backends.ray_runtime.run_control import RunControl
from rlflow.backends.ray_runtime.session import Reserved, device_resources
from rlflow.backends.ray_runtime.streams.edge_actor import EdgeActor
from rlflow.backends.ray_runtime.streams.specs import stream_specs
from rlflow.device_rules import worker_environment
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import Plan, Pool, Queue, SaveCheckpoint

_QUIET: dict[str, Any] = {"num_cpus": 0, "enable_task_events": False}
"""Of actors with calls in every step: Ray would keep 100,000 of them for its dashboard, some 2 kB each."""

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
    @property
    def keep(self) -> int: ...


@dataclass(frozen=True)
class StartedRank:
    """`rank` counts in its pool; `identity` is on its way."""

    pool: str
    rank: int
    actor: Any
    identity: Any = None

    def __str__(self) -> str:
        return f"rank {self.rank} of pool `{self.pool}`"


@dataclass(frozen=True)
class Started:
    """The actors of a run."""

    ranks: list[StartedRank]
    queues: dict[str, Any]
    """By its name, everything between the pools that rows or samples pass."""
    control: Any
    """What the pools agree through; None for one pool."""
    devices: int
    """Of all pools."""
    unwatched: tuple[Any, ...] = ()
    """Further actors, which end with the run."""

    @property
    def actors(self) -> list[Any]:
        return [rank.actor for rank in self.ranks] + self.others

    @property
    def others(self) -> list[Any]:
        """The actors that are no ranks."""
        return [*self.queues.values(), *([] if self.control is None else [self.control]), *self.unwatched]


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
    edges = {
        spec.stage: ray.remote(**_QUIET)(EdgeActor).remote(
            spec, sizes[spec.source] // spec.together, plan.collective_timeout_s
        )
        for spec in stream_specs(plan)
    }
    control = start_control(max(_parts(plan), 1)) if len(pools) > 1 else None
    threads = threads_of(sum(sizes.values()), os.environ)
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
                edges=edges,
                control=control,
                keep=settings.keep,
            )
            strategy = PlacementGroupSchedulingStrategy(
                group.group, placement_group_bundle_index=group.bundle_of[place.host]
            )
            options = {"num_cpus": 1, "resources": device_resources(pool), "scheduling_strategy": strategy}
            actor = remote.options(**options).remote(rank_settings)
            identity = actor.identity.options(concurrency_group="control").remote()
            ranks.append(StartedRank(pool.name, place.rank, actor, identity))
    samples = {f"samples of {stage}": actor for stage, actor in edges.items()}
    return Started(ranks, named(queues) | samples, control, len(ranks))


def start_control(parts: int) -> Any:
    """The actor of what the pools agree on; `parts` of a checkpoint."""
    return ray.remote(**_QUIET, concurrency_groups={"watch": 1})(RunControl).remote(parts)


def start_queues(plan: Plan, sizes: Mapping[str, int]) -> dict[str, list[Any]]:
    """The actors of every queue, by its id; `sizes`: ranks of every pool."""
    return {queue.id: _queue(plan, queue, sizes) for queue in plan.queues}


def named(queues: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Every actor of the queues, by a name that people understand."""
    return {
        name if len(actors) == 1 else f"{name}, part {number + 1}": actor
        for name, actors in queues.items()
        for number, actor in enumerate(actors)
    }


def _parts(plan: Plan) -> int:
    """Parts of a checkpoint: of every pool that trains, and of every pool that samples ahead of training."""
    trains = sum(any(isinstance(i, SaveCheckpoint) for i in program.step) for program in plan.programs)
    return trains + sum(bool(stale_samplers(plan, program.pool)) for program in plan.programs)


def threads_of(ranks: int, environment: Mapping[str, str]) -> int:
    """Threads of a rank's tensor operations: OMP_NUM_THREADS where it is a number, else the machine's cores shared
    out evenly."""
    wanted = environment.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) else max(1, (os.cpu_count() or 1) // ranks)


def _queue(plan: Plan, queue: Queue, sizes: Mapping[str, int]) -> list[Any]:
    """The actors of one queue."""
    spec = edge_of(queue, sizes[queue.source], sizes[queue.target], plan.collective_timeout_s)
    # Every rank of the source may wait for room at once: readers must still get in.
    calls = 2 * (len(spec.producers) + len(spec.consumers)) + _MORE_CALLS
    return start_queue(spec, **_QUIET, max_concurrency=calls)


def _environment(threads: int) -> dict[str, str]:
    """Environment of a rank. Ray would set one OpenMP thread per CPU it was promised, here 1."""
    names = ("HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **kept}
