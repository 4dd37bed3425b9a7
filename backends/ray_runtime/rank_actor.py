"""The Ray actor around a rank. It is light: the process is set up before torch is imported, and the driver, which
must know the class, imports neither torch nor transformers."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rlflow.backends.ray_runtime.failures import blame, guarded
from rlflow.backends.ray_runtime.place import Identity, Place, PlaceNote
from rlflow.backends.ray_runtime.run_logs import log_to, logger, rank_log, reward_log, told
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Score
from rlflow.plan import Plan, RunStage

if TYPE_CHECKING:
    from rlflow.backends.ray_runtime.rank import Rank
    from rlflow.backends.ray_runtime.reward_worker import RewardPool


@dataclass(frozen=True)
class RankSettings:
    """What a rank is told at its start."""

    plan_json: str
    pool: str
    rank: int
    pools: dict[str, int]
    """Ranks of every pool that executes instructions, in the order of the plan."""
    base_dir: str
    run_dir: str
    seed: int
    threads: int
    environment: dict[str, str]
    """Variables to set before anything heavy is imported."""
    deadline_s: float = 1800.0
    """Limit of every wait for another rank."""
    queues: dict[str, Any] = field(default_factory=dict)
    """The actors of every queue between pools."""
    edges: dict[str, Any] = field(default_factory=dict)
    """Actors that admit samples one group at a time, by the stage that samples."""
    control: Any = None
    """Actor of what the pools agree on; None for a plan of one pool."""
    keep: int = 0
    """Newest checkpoints to keep; 0 = all."""
    lengths: str = ""
    """Of responses, where they are imposed: see `rlflow.imposed_lengths`."""


class RankActor:
    """States: new -> prepare, open_rewards (at the same time) -> join -> load(part)... -> resume -> run -> ended.

    `open_rewards` belongs into the concurrency group `rewards`, `identity`, `where` and `request_stop` into `control`.
    Failures are returned, so that Ray adds nothing to them.
    """

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._rank: Rank | None = None
        self._place = PlaceNote()
        self._rewards: dict[str, RewardPool] = {}
        os.environ.update(settings.environment)
        self._log = rank_log(Path(settings.run_dir), settings.pool, settings.rank)
        log_to(self._log, f"{settings.pool}/{settings.rank}")

    def _guarded(self, part: str, action: Callable[[], None]) -> RunFailure | None:
        """`guarded`, with the rank's log in the failure, and the failure in the rank's log."""
        started = time.monotonic()
        failure = guarded(part, action)
        if failure is None:
            logger.info("%s: done in %.1f s", part, time.monotonic() - started)
            return None
        return told(failure, self._log)

    def identity(self) -> Identity:
        """Where this process is."""
        return Identity(socket.gethostname(), ray.get_runtime_context().get_node_id(), os.getpid())

    def where(self, dump: bool = False) -> Place:
        """What the rank does now; `dump`: the stacks of all its threads go to its log."""
        if dump:
            sys.stderr.write(f"--- stacks, asked for by the driver at {time.strftime('%H:%M:%S')}\n")
            sys.stderr.flush()
            faulthandler.dump_traceback(2, all_threads=True)
        return self._place.read()

    def prepare(self) -> RunFailure | None:
        """Import what a rank needs; takes seconds."""

        def build() -> None:
            from rlflow.backends.ray_runtime.rank import Rank

            self._rank = Rank(self._settings, self._place)

        return self._guarded("starting a rank", build)

    def open_rewards(self) -> RunFailure | None:
        """Start the workers of every reward; user code that cannot be loaded is found now."""

        def start() -> None:
            plan = Plan.from_json(self._settings.plan_json)
            self._rewards = _open_rewards(plan, Path(self._settings.base_dir), self._settings)

        return self._guarded("starting the rewards", start)

    def address(self) -> str:
        """host:port on which rank 0's group can be reached; the port is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, address: str) -> RunFailure | None:
        """Form the process groups (gloo) of all pools."""
        return self._guarded("joining the ranks", lambda: self._ready.join(address))

    def load(self, part: str) -> RunFailure | None:
        """Load `models` or `data`."""
        return self._guarded(f"loading {part}", lambda: self._ready.load(part))

    def resume(self, step: int) -> RunFailure | None:
        """Go back to the state after `step` steps."""
        return self._guarded("resuming", lambda: self._ready.resume(step))

    def facts(self) -> dict[str, Any]:
        """What the driver shows and records: steps to run, data fingerprints, model sizes."""
        return self._ready.facts()

    def run(self, done: int, last: int, data: dict[str, str]) -> Iterator[dict[str, Any] | RunFailure]:
        """See `Rank.run`."""
        for report in self._ready.run(done, last, self._rewards, data):
            yield told(report, self._log) if isinstance(report, RunFailure) else report

    def request_stop(self) -> None:
        """End the run after the step in progress."""
        self._ready.request_stop()

    @property
    def _ready(self) -> Rank:
        assert self._rank is not None, "called before prepare"
        return self._rank


def _open_rewards(plan: Plan, base_dir: Path, settings: RankSettings) -> dict[str, RewardPool]:
    """Workers of every reward that this pool calls, shared out evenly over its ranks."""
    from rlflow.backends.ray_runtime.reward_worker import RewardPool

    world = settings.pools[settings.pool]
    program = plan.program(settings.pool)
    lists = (program.step, *(evaluation.instructions for evaluation in program.evaluations))
    called = {i.stage for instructions in lists for i in instructions if isinstance(i, RunStage)}
    scores = [stage for stage in plan.stages if isinstance(stage.op, Score) and stage.id in called]
    pool_of = {stage.op.reward: stage.pool for stage in scores if isinstance(stage.op, Score)}
    sources = {data.name: data.source for data in plan.data}
    rewards: dict[str, RewardPool] = {}
    for declared in plan.rewards:
        if declared.name not in pool_of:
            continue
        pool = next(pool for pool in plan.pools if pool.name == pool_of[declared.name])
        workers = max(1, len(pool.ranks) // world)
        logs = [
            reward_log(Path(settings.run_dir), declared.name, settings.pool, settings.rank, worker)
            for worker in range(workers)
        ]
        reward = RewardPool(declared.name, declared.source, base_dir, sources, workers=workers, logs=logs)
        scored = next(s.id for s in plan.stages if isinstance(s.op, Score) and s.op.reward == declared.name)
        with blame(scored):
            reward.open()
        rewards[declared.name] = reward
    return rewards
