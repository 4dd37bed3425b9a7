"""Runs a plan on Ray: starts or joins a cluster, places the ranks, starts them, and watches. It carries no data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rlflow.backends.ray_runtime.accepted import refuse_unknown
from rlflow.backends.ray_runtime.checkpoint_folder import latest_step, verify
from rlflow.backends.ray_runtime.failures import actor_died, is_echo, is_late, root_cause, worker_died
from rlflow.backends.ray_runtime.reports import StepReports, joined_facts
from rlflow.backends.ray_runtime.restarts import (
    DEFAULT_RESTARTS,
    Restart,
    Restarts,
    from_the_start,
    step_to_resume,
)
from rlflow.backends.ray_runtime.saving.parts import clean
from rlflow.backends.ray_runtime.session import PLACE_DEADLINE_S, Interrupts, ray_session, reserved
from rlflow.backends.ray_runtime.start_ranks import Started, runnable_pools, start_ranks
from rlflow.backends.ray_runtime.teardown import END_S, death_facts, ended_with, wait_until_gone
from rlflow.backends.ray_runtime.virtual.crew import virtual_pools
from rlflow.backends.ray_runtime.virtual.settings import VirtualSettings
from rlflow.backends.ray_runtime.virtual.start import start_virtual
from rlflow.backends.ray_runtime.watchdog import Watchdog, patient_instructions
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import Plan, Pool

LOAD_DEADLINE_S = 1800.0
"""For loading one part on all ranks."""
PEER_GRACE_S = 5.0
"""For the other ranks to fail too, so that the cause is told and not what followed from it."""
LOST_GRACE_S = 45.0
"""For Ray to find out that a host is gone, when ranks have lost the connection to others."""
RETURN_DEADLINE_S = 600.0
"""For a cluster to have again what a run needs, after it has lost a process or a host."""
_POLL_S = 0.2


@dataclass(frozen=True)
class RunSettings:
    """`steps` and `seed` None = as the plan says. `resume` goes on from the newest checkpoint in `run_dir`."""

    base_dir: Path
    run_dir: Path
    steps: int | None = None
    seed: int | None = None
    resume: bool = False
    keep: int = 0
    """Newest checkpoints to keep; 0 = all."""
    address: str | None = None
    """Ray cluster to join; None = RAY_ADDRESS, else a local one that ends with the run."""
    restarts: int = DEFAULT_RESTARTS
    """How often the run is started again after a process died; 0 = never."""
    virtual: VirtualSettings | None = None
    """Sleep instead of computing, on no device."""


@dataclass(frozen=True)
class RunEnd:
    """`step` = completed steps; `interrupted` = stopped by the user."""

    step: int
    total_steps: int
    checkpoint: str
    interrupted: bool


class RunObserver:
    """What a run tells while it goes on; the default does nothing."""

    def phase(self, text: str) -> None:
        """A part of the start-up begins."""

    def ready(self, facts: dict[str, Any], total_steps: int, first_step: int) -> None:
        """Everything is loaded; steps `first_step` to `total_steps` follow."""

    def step(self, step: int, data: dict[str, float], saved: int) -> None:
        """A step has ended. `saved`: the checkpoint that is whole since the report before; 0 = none."""

    def evaluation(self, step: int, data: dict[str, float]) -> None:
        """An evaluation after `step` steps has ended."""

    def message(self, text: str) -> None:
        """Something the user should read."""

    def restarting(self, restart: Restart) -> None:
        """A process died, and the run is started again."""

    def recorded(self) -> int | None:
        """The last step up to which everything that was told is kept; None = nobody keeps it."""
        return None


def run_plan(plan: Plan, settings: RunSettings, observer: RunObserver) -> RunEnd:
    """Run the plan to its end or to the user's Ctrl-C. Raises RunFailure, KeyboardInterrupt on a second Ctrl-C."""
    refuse_unknown(plan)
    pools = runnable_pools(plan) if settings.virtual is None else virtual_pools(plan)
    for folder in ("logs", "trace", "checkpoints"):
        (settings.run_dir / folder).mkdir(parents=True, exist_ok=True)
    checkpoints = settings.run_dir / "checkpoints"
    clean(checkpoints)
    if settings.resume and latest_step(checkpoints) is None:
        observer.message(from_the_start(plan, observer.recorded(), settings.run_dir))
    resume_step = _step_to_resume(checkpoints, observer, plan) if settings.resume else None
    restarts = Restarts(settings.restarts)
    with (
        Interrupts() as interrupts,
        ray_session(settings.address, _cpus(pools, settings), observer.phase),
    ):
        interrupts.install()
        while True:
            with _started(plan, pools, settings, observer, bool(restarts.number)) as started:
                watch = _Watch(started, settings, observer, interrupts, plan)
                try:
                    with ended_with(started):
                        return watch.run(resume_step)
                except RunFailure as failure:
                    if watch.stopping:
                        raise
                    restarts.after(failure, watch.failed_step)
                    clean(checkpoints)
                    resume_step = _step_to_resume(checkpoints, observer, plan)
                    lost = Restart(restarts.number, restarts.limit, failure, watch.failed_step, resume_step or 0)
            interrupts.start_up()
            observer.restarting(lost)
            observer.phase("ending the processes that are left")
            left = wait_until_gone(started)
            if left:
                observer.message(f"still there after {END_S:g} s: {', '.join(f'{p.pid} on {p.host}' for p in left)}")


def _cpus(pools: Sequence[Pool], settings: RunSettings) -> int:
    """That a local Ray is told of at least."""
    return settings.virtual.workers if settings.virtual is not None else sum(len(pool.ranks) for pool in pools)


@contextlib.contextmanager
def _started(
    plan: Plan, pools: list[Pool], settings: RunSettings, observer: RunObserver, again: bool
) -> Iterator[Started]:
    """The actors of a try. Virtual ranks need no resources of their own. `again`: after a process was lost."""
    if settings.virtual is not None:
        observer.phase("starting the virtual ranks")
        yield start_virtual(plan, pools, settings.virtual, settings)
        return
    observer.phase("placing the ranks")
    with reserved(pools, RETURN_DEADLINE_S if again else None) as group:
        yield start_ranks(plan, pools, group, settings)


def _step_to_resume(checkpoints: Path, observer: RunObserver, plan: Plan) -> int | None:
    """The step whose checkpoint the run goes on from, which is as it was written; None = from the start. RLF5045."""
    step = step_to_resume(checkpoints, observer.recorded(), plan)
    if step is not None:
        observer.phase(f"checking the checkpoint of step {step}")
        verify(checkpoints, step)
    return step


class _Watch:
    """Brings the ranks up and follows their report streams until all have ended."""

    def __init__(
        self,
        started: Started,
        settings: RunSettings,
        observer: RunObserver,
        interrupts: Interrupts,
        plan: Plan,
    ) -> None:
        ranks = self._started = started.ranks
        self._ranks = [rank.actor for rank in ranks]
        self._queues = list(started.queues.values())
        self._control = started.control
        self._others = {actor.ended.remote(): f"the queue `{name}`" for name, actor in started.queues.items()}
        if started.control is not None:
            ended = started.control.ended.options(concurrency_group="watch").remote()
            self._others[ended] = "what the pools agree through"
        self._watchdog = Watchdog(ranks, plan.collective_timeout_s, started.queues, patient_instructions(plan))
        self._reached = dict.fromkeys((rank.pool for rank in ranks), 0)
        """Pool to the steps that it has reported."""
        self._failed_in = ""
        """Pool of the rank that failed; empty where none is to blame."""
        self._settings = settings
        self._observer = observer
        self._interrupts = interrupts
        self._reports_of = StepReports([rank.pool for rank in ranks if rank.rank == 0], started.devices)
        self._end: dict[str, Any] = {"step": 0, "checkpoint": ""}
        self._asked = False
        self._streams: dict[Any, int] = {}

    def run(self, resume_step: int | None) -> RunEnd:
        """Everything from the first call to the end of the run."""
        done = resume_step or 0
        self._reached = dict.fromkeys(self._reached, done)
        self._load(resume_step)
        facts = joined_facts(self._all([self._ranks[i].facts.remote() for i in self._heads], LOAD_DEADLINE_S))
        total = facts["total_steps"] if self._settings.steps is None else self._settings.steps
        self._end["step"] = done
        self._observer.ready(facts, total, done + 1)
        self._observer.phase("running")
        self._interrupts.finish_steps()
        self._follow(done, total, facts)
        if self._asked and not self._end["step"]:
            raise KeyboardInterrupt  # before the first step: there is nothing to go on with
        return RunEnd(self._end["step"], total, self._end["checkpoint"], self._asked)

    @property
    def stopping(self) -> bool:
        """Whether the user has asked for the end."""
        return bool(self._interrupts.count)

    @property
    def failed_step(self) -> int:
        """The step that was in progress where the run failed."""
        return self._reached.get(self._failed_in, min(self._reached.values())) + 1

    # --- start-up ----------------------------------------------------------------------------------------------------

    @property
    def _heads(self) -> list[int]:
        """The first rank of every pool."""
        return [index for index, rank in enumerate(self._started) if rank.rank == 0]

    def _load(self, resume_step: int | None) -> None:
        # Their processes start beside everything else.
        rewards = [rank.open_rewards.options(concurrency_group="rewards").remote() for rank in self._ranks]
        self._everywhere(lambda rank: rank.prepare.remote(), "starting the ranks")
        if len(self._ranks) > 1:
            address = self._all([self._ranks[0].address.remote()], PLACE_DEADLINE_S)[0]
            self._everywhere(lambda rank: rank.join.remote(address), f"joining {len(self._ranks)} ranks")
        for part in ("models", "data"):
            self._everywhere(lambda rank, part=part: rank.load.remote(part), f"loading {part}")  # type: ignore[misc]
        if self._queues:
            self._observer.phase("opening the queues")
            self._answers([queue.describe.remote() for queue in self._queues], "a queue")
        self._observer.phase("loading rewards")
        self._all(rewards, LOAD_DEADLINE_S)
        if resume_step is not None:
            self._everywhere(lambda rank: rank.resume.remote(resume_step), f"resuming after step {resume_step}")

    def _everywhere(self, call: Callable[[Any], Any], what: str) -> None:
        self._observer.phase(what)
        self._all([call(rank) for rank in self._ranks], LOAD_DEADLINE_S)

    def _all(self, refs: list[Any], deadline_s: float) -> list[Any]:
        """Results of calls to the ranks from the first on. Raises the RunFailure among them that came first, or that
        caused it."""
        until = time.monotonic() + deadline_s
        failed_at: float | None = None
        while True:
            done, waiting = ray.wait(refs, num_returns=len(refs), timeout=_POLL_S)
            results: dict[Any, Any] = {}
            for ref in done:
                try:
                    results[ref] = ray.get(ref)
                except ray.exceptions.RayError as error:
                    raise self._died(refs.index(ref), error) from None
            self._check_others()
            failures = [result for result in results.values() if isinstance(result, RunFailure)]
            if failures:
                failed_at = failed_at or time.monotonic()
                cause = root_cause(failures)
                if not is_echo(cause) or not waiting or time.monotonic() > failed_at + PEER_GRACE_S:
                    raise cause
            if not waiting:
                return [results[ref] for ref in refs]
            if time.monotonic() > until:
                late = ", ".join(str(self._started[refs.index(ref)]) for ref in waiting)
                raise RunFailure("RLF5008", f"{late} did not answer within {deadline_s:g} s of start-up")

    def _answers(self, refs: list[Any], what: str) -> None:
        """Actors other than ranks answer a first call. RLF5008 when they do not."""
        try:
            ray.get(refs, timeout=PLACE_DEADLINE_S)
        except ray.exceptions.RayError as error:
            notes = (f"{type(error).__name__}: {error}",)
            raise RunFailure("RLF5008", f"{what} did not start within {PLACE_DEADLINE_S:g} s", notes=notes) from None

    def _died(self, index: int, error: Exception) -> RunFailure:
        rank = self._started[index]
        self._failed_in = rank.pool
        return worker_died(rank.pool, rank.rank, error, self._settings.run_dir, death_facts(rank, self._started))

    def _check_others(self) -> None:
        """RLF5011 for a queue, or what the pools agree through, that is gone."""
        done, _ = ray.wait(list(self._others), num_returns=1, timeout=0) if self._others else ([], [])
        for ref in done:
            raise self._other_died(ref)

    def _other_died(self, ref: Any) -> RunFailure:
        what = self._others.pop(ref)
        self._failed_in = ""
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            return actor_died(what, error)
        raise AssertionError(f"{what} has ended")

    # --- the run -----------------------------------------------------------------------------------------------------

    def _follow(self, done: int, total: int, facts: dict[str, Any]) -> None:
        data = {name: found["sha256"] for name, found in facts["data"].items()}
        self._streams = {
            rank.run.options(num_returns="streaming").remote(done, total, data): index
            for index, rank in enumerate(self._ranks)
        }
        while self._streams:
            if self._interrupts.count and not self._asked:
                self._asked = True
                self._observer.message("stopping after this step and saving a checkpoint; Ctrl-C again to stop at once")
                if self._control is not None:
                    self._control.stop.remote()
                else:
                    for rank in self._ranks:
                        rank.request_stop.options(concurrency_group="control").remote()
            for report in self._reports():
                if isinstance(report, RunFailure):
                    raise self._cause(report)
                self._reports_of.add(report)
                self._watchdog.heard()
            for report in self._reports_of.whole():
                self._tell(report)
            hanging = self._watchdog.check()
            if hanging is not None:
                self._failed_in = ""
                raise hanging

    def _reports(self) -> list[dict[str, Any] | RunFailure]:
        """What has come from any rank within the poll time. A rank that ended or died is followed no longer."""
        ready, _ = ray.wait([*self._streams, *self._others], num_returns=1, timeout=_POLL_S)
        reports: list[dict[str, Any] | RunFailure] = []
        for stream in ready:
            if stream in self._others:
                reports.append(self._other_died(stream))
                continue
            try:
                report = ray.get(next(stream))
            except StopIteration:
                del self._streams[stream]
                continue
            except ray.exceptions.RayError as error:
                reports.append(self._died(self._streams.pop(stream), error))
                continue
            pool = self._started[self._streams[stream]].pool
            if isinstance(report, RunFailure):
                self._failed_in = pool
            else:
                self._reached[pool] = max(self._reached[pool], report["step"])
            reports.append(report)
        return reports

    def _cause(self, first: RunFailure) -> RunFailure:
        """Wait for the others to fail too. Where all have only lost somebody, a host may be gone, which takes Ray some
        time to find out."""
        failures = [(first, self._failed_in)]
        begun = time.monotonic()
        while self._streams and (waited := time.monotonic() - begun) < LOST_GRACE_S:
            found = root_cause([failure for failure, _ in failures])
            if not (is_echo(found) or is_late(found)) or (waited > PEER_GRACE_S and is_late(found)):
                break
            failures += [(report, self._failed_in) for report in self._reports() if isinstance(report, RunFailure)]
        cause = root_cause([failure for failure, _ in failures])
        self._failed_in = next(pool for failure, pool in failures if failure is cause)
        return self._watchdog.blame(cause) if is_late(cause) else cause

    def _tell(self, report: dict[str, Any]) -> None:
        if report.get("ended"):
            self._end = {"step": report["step"], "checkpoint": self._end["checkpoint"] or report["checkpoint"]}
        elif report.get("evaluation"):
            self._observer.evaluation(report["step"], report["data"])
        else:
            self._observer.step(report["step"], report["data"], report["saved"])
