"""The Ray actor around a rank. It is light: the process is set up before torch is imported, and the driver, which
must know the class, imports neither torch nor transformers."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rlflow.backends.ray_runtime.failures import blame, guarded
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
    """Actors of the queues between pools."""
    edges: dict[str, Any] = field(default_factory=dict)
    """Actors that admit samples one group at a time, by the stage that samples."""
    control: Any = None
    """Actor of what the pools agree on; None for a plan of one pool."""


class RankActor:
    """States: new -> prepare, open_rewards (at the same time) -> join -> load(part)... -> resume -> run -> ended.

    `open_rewards` and `request_stop` belong into the concurrency groups `rewards` and `control`. Failures are
    returned, so that Ray adds nothing to them.
    """

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._rank: Rank | None = None
        self._rewards: dict[str, RewardPool] = {}
        os.environ.update(settings.environment)
        self._log_to_file()

    def _log_to_file(self) -> None:
        """Everything this process prints goes to the run folder, not between the user's progress lines."""
        path = Path(self._settings.run_dir) / "logs" / f"{self._settings.pool}-{self._settings.rank}.log"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.enable(2)

    def prepare(self) -> RunFailure | None:
        """Import what a rank needs; takes seconds."""

        def build() -> None:
            from rlflow.backends.ray_runtime.rank import Rank

            self._rank = Rank(self._settings)

        return guarded("starting a rank", build)

    def open_rewards(self) -> RunFailure | None:
        """Start the workers of every reward; user code that cannot be loaded is found now."""

        def start() -> None:
            plan = Plan.from_json(self._settings.plan_json)
            self._rewards = _open_rewards(plan, Path(self._settings.base_dir), self._settings)

        return guarded("starting the rewards", start)

    def address(self) -> str:
        """host:port on which rank 0's group can be reached; the port is free now."""
        import socket

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, address: str) -> RunFailure | None:
        """Form the process groups (gloo) of all pools."""
        return guarded("joining the ranks", lambda: self._ready.join(address))

    def load(self, part: str) -> RunFailure | None:
        """Load `models` or `data`."""
        return guarded(f"loading {part}", lambda: self._ready.load(part))

    def resume(self, step: int) -> RunFailure | None:
        """Go back to the state after `step` steps."""
        return guarded("resuming", lambda: self._ready.resume(step))

    def facts(self) -> dict[str, Any]:
        """What the driver shows and records: steps to run, data fingerprints, model sizes."""
        return self._ready.facts()

    def run(self, done: int, last: int, data: dict[str, str]) -> Iterator[dict[str, Any] | RunFailure]:
        """See `Rank.run`."""
        yield from self._ready.run(done, last, self._rewards, data)

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
        reward = RewardPool(declared.name, declared.source, base_dir, sources, workers=workers)
        scored = next(s.id for s in plan.stages if isinstance(s.op, Score) and s.op.reward == declared.name)
        with blame(scored):
            reward.open()
        rewards[declared.name] = reward
    return rewards
