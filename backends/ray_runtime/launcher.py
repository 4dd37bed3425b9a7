"""Runs a plan on Ray: starts or joins a cluster, places the ranks, starts them, and watches. It carries no data."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlflow.backends.ray_runtime.accepted import refuse_lent_devices
from rlflow.backends.ray_runtime.checkpoint_folder import latest_step
from rlflow.backends.ray_runtime.failures import root_cause, worker_died
from rlflow.backends.ray_runtime.rank_actor import RankActor, RankSettings
from rlflow.backends.ray_runtime.session import PLACE_DEADLINE_S, Interrupts, ray_session, reserved
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
    refuse_lent_devices(plan)
    pool = _only_pool(plan)
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
        ray_session(settings.address, len(pool.ranks), observer.phase),
    ):
        interrupts.install()
        observer.phase(f"placing pool {pool.name} ({len(pool.ranks)} x {pool.device})")
        with reserved(pool) as group:
            ranks = _start(plan, pool, group, settings)
            return _Watch(ranks, pool, settings, observer, interrupts).run(resume_step)


def _only_pool(plan: Plan) -> Pool:
    pools = [pool for pool in plan.pools if pool.device != "functions"]
    if len(pools) != 1:
        raise RunFailure(
            "RLF4003",
            f"this version runs plans of one pool, and this one has {len(pools)}",
            help=("compile with `--cluster local` to run on this machine, colocated",),
        )
    if pools[0].device != "cpu":
        raise RunFailure(
            "RLF4003",
            f"this version runs on CPU, and pool `{pools[0].name}` is made of {pools[0].device} devices",
            help=("compile with `--cluster local` to run on this machine",),
        )
    for stage in plan.stages:
        layout = stage.layout
        if layout is not None and max(layout.tp, layout.pp, layout.ep) > 1:
            raise RunFailure(
                "RLF4003",
                f"this version runs data parallelism only, not tp {layout.tp}, pp {layout.pp}, ep {layout.ep}",
                stage=stage.id,
                help=("compile with `--cluster local` to run on this machine",),
            )
    return pools[0]


def _start(plan: Plan, pool: Pool, group: PlacementGroup, settings: RunSettings) -> list[Any]:
    """One actor per rank, in rank order."""
    world = len(pool.ranks)
    threads = max(1, (os.cpu_count() or 1) // world)
    remote = ray.remote(concurrency_groups={"control": 1, "rewards": 1})(RankActor)
    ranks = []
    for place in pool.ranks:
        rank_settings = RankSettings(
            plan_json=plan.to_json(),
            pool=pool.name,
            rank=place.rank,
            world=world,
            base_dir=str(settings.base_dir.absolute()),
            run_dir=str(settings.run_dir.absolute()),
            seed=plan.seed if settings.seed is None else settings.seed,
            threads=threads,
            environment=_environment(threads),
        )
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place.rank)
        ranks.append(remote.options(num_cpus=1, scheduling_strategy=strategy).remote(rank_settings))
    return ranks


def _environment(threads: int) -> dict[str, str]:
    """Environment of a rank. Ray would set one OpenMP thread per CPU it was promised, here 1."""
    names = ("HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **kept}


class _Watch:
    """Brings the ranks up and follows their report streams until all have ended."""

    def __init__(
        self, ranks: list[Any], pool: Pool, settings: RunSettings, observer: RunObserver, interrupts: Interrupts
    ) -> None:
        self._ranks = ranks
        self._pool = pool
        self._settings = settings
        self._observer = observer
        self._interrupts = interrupts
        self._end: dict[str, Any] = {"step": 0, "checkpoint": ""}
        self._asked = False
        self._streams: dict[Any, int] = {}

    def run(self, resume_step: int | None) -> RunEnd:
        """Everything from the first call to the end of the run."""
        self._load(resume_step)
        facts = self._all([self._ranks[0].facts.remote()], LOAD_DEADLINE_S)[0]
        total = facts["total_steps"] if self._settings.steps is None else self._settings.steps
        done = resume_step or 0
        self._end["step"] = done
        self._observer.ready(facts, total, done + 1)
        self._observer.phase("running")
        self._interrupts.finish_steps()
        self._follow(done, total)
        if self._asked and not self._end["step"]:
            raise KeyboardInterrupt  # before the first step: there is nothing to go on with
        return RunEnd(self._end["step"], total, self._end["checkpoint"], self._asked)

    # --- start-up ----------------------------------------------------------------------------------------------------

    def _load(self, resume_step: int | None) -> None:
        # Their processes start beside everything else.
        rewards = [rank.open_rewards.options(concurrency_group="rewards").remote() for rank in self._ranks]
        self._everywhere(lambda rank: rank.prepare.remote(), "starting the ranks")
        if len(self._ranks) > 1:
            address = self._all([self._ranks[0].address.remote()], PLACE_DEADLINE_S)[0]
            self._everywhere(lambda rank: rank.join.remote(address), f"joining {len(self._ranks)} ranks")
        for part in ("models", "data"):
            self._everywhere(lambda rank, part=part: rank.load.remote(part), f"loading {part}")  # type: ignore[misc]
        self._observer.phase("loading rewards")
        self._all(rewards, LOAD_DEADLINE_S)
        if resume_step is not None:
            self._everywhere(lambda rank: rank.resume.remote(resume_step), f"resuming after step {resume_step}")

    def _everywhere(self, call: Callable[[Any], Any], what: str) -> None:
        self._observer.phase(what)
        self._all([call(rank) for rank in self._ranks], LOAD_DEADLINE_S)

    def _all(self, refs: list[Any], deadline_s: float) -> list[Any]:
        """Results of calls to the ranks from 0 on. Raises the first RunFailure among them."""
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
                late = ", ".join(str(refs.index(ref)) for ref in waiting)
                raise RunFailure(
                    "RLF5008",
                    f"pool `{self._pool.name}`: rank {late} did not answer within {deadline_s:g} s of start-up",
                )

    def _died(self, rank: int, error: Exception) -> RunFailure:
        return worker_died(self._pool.name, rank, error, self._settings.run_dir)

    # --- the run -----------------------------------------------------------------------------------------------------

    def _follow(self, done: int, total: int) -> None:
        self._streams = {
            rank.run.options(num_returns="streaming").remote(done, total): index
            for index, rank in enumerate(self._ranks)
        }
        while self._streams:
            if self._interrupts.count and not self._asked:
                self._asked = True
                self._observer.message("stopping after this step and saving a checkpoint; Ctrl-C again to stop at once")
                for rank in self._ranks:
                    rank.request_stop.options(concurrency_group="control").remote()
            for report in self._reports():
                if isinstance(report, RunFailure):
                    raise self._cause(report)
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
            self._end = report
        elif report.get("evaluation"):
            self._observer.evaluation(report["step"], report["data"])
        else:
            self._observer.step(report["step"], report["data"], report["saved"])
