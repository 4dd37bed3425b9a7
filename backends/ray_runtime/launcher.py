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
from rlflow.backends.ray_runtime.checkpoint_folder import latest_step
from rlflow.backends.ray_runtime.failures import root_cause, worker_died
from rlflow.backends.ray_runtime.reports import StepReports, joined_facts
from rlflow.backends.ray_runtime.session import PLACE_DEADLINE_S, Interrupts, ray_session, reserved
from rlflow.backends.ray_runtime.start_ranks import Started, runnable_pools, start_ranks
from rlflow.backends.ray_runtime.virtual.crew import virtual_pools
from rlflow.backends.ray_runtime.virtual.settings import VirtualSettings
from rlflow.backends.ray_runtime.virtual.start import start_virtual
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import Plan, Pool

LOAD_DEADLINE_S = 1800.0
"""For loading one part on all ranks."""
PEER_GRACE_S = 5.0
"""For the other ranks to fail too, so that the cause is told and not what followed from it."""
_POLL_S = 0.2


@dataclass(frozen=True)
class RunSettings:
    """`steps` and `seed` None = as the plan says. `resume` goes on from the newest checkpoint in `run_dir`."""

    base_dir: Path
    run_dir: Path
    steps: int | None = None
    seed: int | None = None
    resume: bool = False
    address: str | None = None
    """Ray cluster to join; None = RAY_ADDRESS, else a local one that ends with the run."""
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

    def step(self, step: int, data: dict[str, float], saved: bool) -> None:
        """A step has ended."""

    def evaluation(self, step: int, data: dict[str, float]) -> None:
        """An evaluation after `step` steps has ended."""

    def message(self, text: str) -> None:
        """Something the user should read."""


def run_plan(plan: Plan, settings: RunSettings, observer: RunObserver) -> RunEnd:
    """Run the plan to its end or to the user's Ctrl-C. Raises RunFailure, KeyboardInterrupt on a second Ctrl-C."""
    refuse_unknown(plan)
    pools = runnable_pools(plan) if settings.virtual is None else virtual_pools(plan)
    for folder in ("logs", "trace", "checkpoints"):
        (settings.run_dir / folder).mkdir(parents=True, exist_ok=True)
    resume_step = latest_step(settings.run_dir / "checkpoints") if settings.resume else None
    if settings.resume and resume_step is None:
        raise RunFailure(
            "RLF5010",
            f"there is no checkpoint to resume from in `{settings.run_dir}`",
            help=("start it anew in another run folder",),
        )
    with (
        Interrupts() as interrupts,
        ray_session(settings.address, _cpus(pools, settings), observer.phase),
    ):
        interrupts.install()
        with _started(plan, pools, settings, observer) as started:
            return _Watch(started, settings, observer, interrupts).run(resume_step)


def _cpus(pools: Sequence[Pool], settings: RunSettings) -> int:
    """That a local Ray is told of at least."""
    return settings.virtual.workers if settings.virtual is not None else sum(len(pool.ranks) for pool in pools)


@contextlib.contextmanager
def _started(plan: Plan, pools: list[Pool], settings: RunSettings, observer: RunObserver) -> Iterator[Started]:
    """The actors of the run. Virtual ranks need no resources of their own."""
    if settings.virtual is not None:
        observer.phase("starting the virtual ranks")
        yield start_virtual(plan, pools, settings.virtual, settings)
        return
    observer.phase("placing the ranks")
    with reserved(pools) as group:
        yield start_ranks(plan, pools, group, settings)


class _Watch:
    """Brings the ranks up and follows their report streams until all have ended."""

    def __init__(
        self,
        started: Started,
        settings: RunSettings,
        observer: RunObserver,
        interrupts: Interrupts,
    ) -> None:
        ranks = self._started = started.ranks
        self._ranks = [rank.actor for rank in ranks]
        self._queues = started.queues
        self._control = started.control
        self._settings = settings
        self._observer = observer
        self._interrupts = interrupts
        self._reports_of = StepReports([rank.pool for rank in ranks if rank.rank == 0], started.devices)
        self._end: dict[str, Any] = {"step": 0, "checkpoint": ""}
        self._asked = False
        self._streams: dict[Any, int] = {}

    def run(self, resume_step: int | None) -> RunEnd:
        """Everything from the first call to the end of the run."""
        self._load(resume_step)
        facts = joined_facts(self._all([self._ranks[i].facts.remote() for i in self._heads], LOAD_DEADLINE_S))
        total = facts["total_steps"] if self._settings.steps is None else self._settings.steps
        done = resume_step or 0
        self._end["step"] = done
        self._observer.ready(facts, total, done + 1)
        self._observer.phase("running")
        self._interrupts.finish_steps()
        self._follow(done, total, facts)
        if self._asked and not self._end["step"]:
            raise KeyboardInterrupt  # before the first step: there is nothing to go on with
        return RunEnd(self._end["step"], total, self._end["checkpoint"], self._asked)

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
        """Results of calls to the ranks from the first on. Raises the first RunFailure among them."""
        until = time.monotonic() + deadline_s
        while True:
            done, waiting = ray.wait(refs, num_returns=len(refs), timeout=_POLL_S)
            results: dict[Any, Any] = {}
            for ref in done:
                try:
                    results[ref] = ray.get(ref)
                except ray.exceptions.RayError as error:
                    raise self._died(refs.index(ref), error) from None
                if isinstance(results[ref], RunFailure):
                    raise results[ref]
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
        return worker_died(rank.pool, rank.rank, error, self._settings.run_dir)

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
            for report in self._reports_of.whole():
                self._tell(report)

    def _reports(self) -> list[dict[str, Any] | RunFailure]:
        """What has come from any rank within the poll time. A rank that ended or died is followed no longer."""
        ready, _ = ray.wait(list(self._streams), num_returns=1, timeout=_POLL_S)
        reports: list[dict[str, Any] | RunFailure] = []
        for stream in ready:
            try:
                reports.append(ray.get(next(stream)))
            except StopIteration:
                del self._streams[stream]
            except ray.exceptions.RayError as error:
                reports.append(self._died(self._streams.pop(stream), error))
        return reports

    def _cause(self, first: RunFailure) -> RunFailure:
        failures = [first]
        until = time.monotonic() + PEER_GRACE_S
        while first.code == "RLF5006" and self._streams and time.monotonic() < until:
            failures += [report for report in self._reports() if isinstance(report, RunFailure)]
        return root_cause(failures)

    def _tell(self, report: dict[str, Any]) -> None:
        if report.get("ended"):
            self._end = {"step": report["step"], "checkpoint": self._end["checkpoint"] or report["checkpoint"]}
        elif report.get("evaluation"):
            self._observer.evaluation(report["step"], report["data"])
        else:
            self._observer.step(report["step"], report["data"], report["saved"])
