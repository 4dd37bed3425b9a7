"""Runs a plan on Ray: starts or joins a cluster, places the ranks, starts them, and watches. It carries no data."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlflow.backends.ray_runtime.checkpoint import latest_step
from rlflow.backends.ray_runtime.rank import Rank, RankSettings
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import Plan, Pool

START_DEADLINE_S = 60.0
"""For Ray to give the pool its resources."""
LOAD_DEADLINE_S = 1800.0
"""For loading one part on all ranks."""
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
    with _Interrupts() as interrupts, _ray(plan, pool, settings, observer):
        group = _reserve(pool, observer)
        try:
            ranks = _start(plan, pool, group, settings)
            return _watch(ranks, pool, settings, observer, interrupts, resume_step)
        finally:
            with contextlib.suppress(Exception):
                remove_placement_group(group)


def _only_pool(plan: Plan) -> Pool:
    pools = [pool for pool in plan.pools if pool.device != "functions"]
    if len(pools) != 1:
        raise RunFailure("RLF4003", f"this version runs plans of one pool, and this one has {len(pools)}")
    if pools[0].device != "cpu":
        raise RunFailure(
            "RLF4003",
            f"this version runs on CPU, and pool `{pools[0].name}` is made of {pools[0].device} devices",
            help=("compile with `--cluster local` to run on this machine",),
        )
    return pools[0]


class _Interrupts:
    """Ctrl-C and SIGTERM ask for a clean stop; a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.count = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not the main thread: the caller handles signals
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _ray(plan: Plan, pool: Pool, settings: RunSettings, observer: RunObserver) -> Iterator[None]:
    """A Ray connection for the run. One that was there before is used and left as it is."""
    if ray.is_initialized():
        yield
        return
    address = settings.address or os.environ.get("RAY_ADDRESS")
    observer.phase(f"connecting to Ray at {address}" if address else "starting Ray")
    for name in ("ray._private.accelerators.npu", "ray._private.accelerators"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        options["address"] = address
    else:
        # A pool of several ranks on this machine shares its cores, so Ray is told of as many CPUs as ranks.
        options |= {
            "num_cpus": max(os.cpu_count() or 1, len(pool.ranks)),
            "include_dashboard": False,
            "configure_logging": False,
        }
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise RunFailure(
            "RLF5008",
            f"cannot connect to Ray at `{address}`" if address else "Ray does not start on this machine",
            notes=(f"{type(error).__name__}: {error}",),
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _reserve(pool: Pool, observer: RunObserver) -> PlacementGroup:
    """A placement group with a bundle per rank. RLF5008 with wanted and available when it is not given in time."""
    observer.phase(f"placing pool {pool.name} ({len(pool.ranks)} x {pool.device})")
    group = placement_group([{"CPU": 1.0}] * len(pool.ranks), strategy="PACK", name=f"rlflow-{pool.name}-{os.getpid()}")
    if group.wait(timeout_seconds=START_DEADLINE_S):
        return group
    have = ray.available_resources().get("CPU", 0.0)
    total = ray.cluster_resources().get("CPU", 0.0)
    remove_placement_group(group)
    raise RunFailure(
        "RLF5008",
        f"Ray did not give pool `{pool.name}` its resources within {START_DEADLINE_S:g} s",
        notes=(
            f"wanted: {len(pool.ranks)} bundles of 1 CPU",
            f"the cluster has {total:g} CPUs, {have:g} of them free",
        ),
        help=("use a smaller pool, or free the cluster",),
    )


def _start(plan: Plan, pool: Pool, group: PlacementGroup, settings: RunSettings) -> list[Any]:
    """One actor per rank, in rank order."""
    world = len(pool.ranks)
    threads = max(1, (os.cpu_count() or 1) // world)
    remote = ray.remote(Rank)
    plan_json = plan.to_json()
    ranks = []
    for place in pool.ranks:
        rank_settings = RankSettings(
            plan_json=plan_json,
            pool=pool.name,
            rank=place.rank,
            world=world,
            base_dir=str(settings.base_dir.absolute()),
            run_dir=str(settings.run_dir.absolute()),
            seed=plan.seed if settings.seed is None else settings.seed,
            threads=threads,
        )
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place.rank)
        ranks.append(
            remote.options(
                num_cpus=1,
                max_concurrency=2,  # request_stop while run goes on
                scheduling_strategy=strategy,
                runtime_env={"env_vars": _environment(threads)},
            ).remote(rank_settings)
        )
    return ranks


def _environment(threads: int) -> dict[str, str]:
    """Environment of a rank. Ray would set one OpenMP thread per CPU it was promised, here 1."""
    names = ("PYTHONPATH", "HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **kept}


def _watch(
    ranks: list[Any],
    pool: Pool,
    settings: RunSettings,
    observer: RunObserver,
    interrupts: _Interrupts,
    resume_step: int | None,
) -> RunEnd:
    """Load, run, and report until all ranks have ended."""

    def everywhere(call: Callable[[Any], Any], what: str) -> None:
        observer.phase(what)
        for failure in _all([call(rank) for rank in ranks], pool, LOAD_DEADLINE_S, interrupts):
            if isinstance(failure, RunFailure):
                raise failure

    if len(ranks) > 1:
        address = _all([ranks[0].address.remote()], pool, START_DEADLINE_S, interrupts)[0]
        everywhere(lambda rank: rank.join.remote(address), f"joining {len(ranks)} ranks")
    for part in ("models", "data", "rewards"):
        everywhere(lambda rank, part=part: rank.load.remote(part), f"loading {part}")  # type: ignore[misc]
    if resume_step is not None:
        everywhere(lambda rank: rank.resume.remote(resume_step), f"resuming after step {resume_step}")
    facts = _all([ranks[0].facts.remote()], pool, LOAD_DEADLINE_S, interrupts)[0]
    total = facts["total_steps"] if settings.steps is None else settings.steps
    done = resume_step or 0
    observer.ready(facts, total, done + 1)
    return _Watch(ranks, pool, observer, interrupts, total).run(done)


class _Watch:
    """Follows the report streams of all ranks."""

    def __init__(
        self, ranks: list[Any], pool: Pool, observer: RunObserver, interrupts: _Interrupts, total: int
    ) -> None:
        self._ranks = ranks
        self._pool = pool
        self._observer = observer
        self._interrupts = interrupts
        self._total = total
        self._end: dict[str, Any] = {"step": 0, "checkpoint": ""}
        self._asked = False

    def run(self, done: int) -> RunEnd:
        self._end["step"] = done
        streams = {
            rank.run.options(num_returns="streaming").remote(done, self._total): index
            for index, rank in enumerate(self._ranks)
        }
        while streams:
            self._pass_on_interrupt()
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=_POLL_S)
            for stream in ready:
                try:
                    report = ray.get(next(stream))
                except StopIteration:
                    del streams[stream]
                    continue
                except ray.exceptions.RayError as error:
                    raise _worker_died(self._pool, streams[stream], error) from None
                self._take(report)
        return RunEnd(self._end["step"], self._total, self._end["checkpoint"], self._asked)

    def _pass_on_interrupt(self) -> None:
        if self._interrupts.count and not self._asked:
            self._asked = True
            self._observer.message("stopping after this step and saving a checkpoint; Ctrl-C again to stop at once")
            for rank in self._ranks:
                rank.request_stop.remote()

    def _take(self, report: dict[str, Any] | RunFailure) -> None:
        if isinstance(report, RunFailure):
            raise report
        if report.get("ended"):
            self._end = report
        elif report.get("evaluation"):
            self._observer.evaluation(report["step"], report["data"])
        else:
            self._observer.step(report["step"], report["data"], report["saved"])


def _all(refs: list[Any], pool: Pool, deadline_s: float, interrupts: _Interrupts) -> list[Any]:
    """Results of all calls. During start-up nothing is worth saving, so the first Ctrl-C already ends the run."""
    until = time.monotonic() + deadline_s
    while True:
        if interrupts.count:
            raise KeyboardInterrupt
        done, waiting = ray.wait(refs, num_returns=len(refs), timeout=_POLL_S)
        results: dict[Any, Any] = {}
        for ref in done:
            try:
                results[ref] = ray.get(ref)
            except ray.exceptions.RayError as error:
                raise _worker_died(pool, refs.index(ref), error) from None
            if isinstance(results[ref], RunFailure):
                raise results[ref]
        if not waiting:
            return [results[ref] for ref in refs]
        if time.monotonic() > until:
            late = ", ".join(str(refs.index(ref)) for ref in waiting)
            raise RunFailure(
                "RLF5008", f"pool `{pool.name}`: rank {late} did not answer within {deadline_s:g} s of start-up"
            )


def _worker_died(pool: Pool, rank: int, error: Exception) -> RunFailure:
    cause = getattr(error, "cause", None)
    text = str(error).strip().splitlines()
    return RunFailure(
        "RLF5011",
        f"rank {rank} of pool `{pool.name}` died",
        notes=(f"its log: logs/{pool.name}-{rank}.log in the run folder",)
        + ((f"{type(cause).__name__}: {cause}",) if cause else (f"{type(error).__name__}: {text[-1] if text else ''}",)),
        trace=str(error),
    )
