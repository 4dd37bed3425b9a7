"""The Python interface: `rlflow.check`, `compile`, `simulate`, `run` and `resume`, and what they give.

Each takes a .rlflow file, or what the one before it gave. The command line does the same with the same parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow import driver
from rlflow.driver import Checked, Options
from rlflow.notebook import Shown
from rlflow.plan import Plan

if TYPE_CHECKING:
    from rlflow.backends.simulator.report_study import Study
    from rlflow.backends.visualizers.progress import Progress
    from rlflow.runs import RunRequest

PathLike = str | Path
Overrides = Mapping[str, Any] | Sequence[str]
"""`{"batch.count": 8}`, or as on the command line `["batch.count=8"]`."""


def check(
    source: PathLike,
    options: Options | None = None,
    *,
    overrides: Overrides = (),
    flow: str | None = None,
    cluster: str | None = None,
    profile: PathLike | None = None,
) -> Checked:
    """Everything that can be found wrong with a .rlflow file without running it.

    Raises CompileError, whose `diagnostics` are all findings of the phase that failed, and OSError.
    """
    return driver.check(source, _options(options, overrides, flow, cluster, profile))


def compile(
    source: PathLike | Checked,
    options: Options | None = None,
    *,
    overrides: Overrides = (),
    flow: str | None = None,
    cluster: str | None = None,
    profile: PathLike | None = None,
) -> Plan:
    """The plan of a .rlflow file or of what `check` gave; of a .json file the plan that it holds.

    Raises CompileError, OSError, RunFailure RLF4001 for a file that is no plan, and TypeError where options are given
    for something that is compiled or checked already.
    """
    chosen = _options(options, overrides, flow, cluster, profile)
    if isinstance(source, Checked):
        _refuse(chosen, "a checked program has its options: give them to `check`")
        return driver.plan_of(source, source.options)
    if Path(source).suffix == ".json":
        _refuse(chosen, "options apply to a .rlflow file; this is a plan already")
        return driver.load_plan(source)
    return driver.compile(source, chosen)


def simulate(
    source: PathLike | Checked | Plan,
    options: Options | None = None,
    *,
    steps: int = 20,
    seeds: int = 0,
    stage: Mapping[str, float] | None = None,
    evaluations: bool = False,
    overrides: Overrides = (),
    flow: str | None = None,
    cluster: str | None = None,
    profile: PathLike | None = None,
) -> Schedule:
    """What a plan does over `steps` steps, in virtual time.

    `seeds`: draw response lengths, so many times; 0 = every stage takes the time of its estimate. `stage`: seconds of
    stages, in place of their estimates. Raises as `compile`, RunFailure RLF4004 where a time is not known, and
    ValueError for less than one step or a negative number of seeds.
    """
    if steps < 1 or seeds < 0:
        raise ValueError(f"steps={steps}, seeds={seeds}: at least 1 and 0")
    plan = _plan(source, options, overrides, flow, cluster, profile)
    return Schedule(plan, study_of(plan, steps, seeds, stage or {}, evaluations))


def study_of(plan: Plan, steps: int, seeds: int, stated: Mapping[str, float], evaluations: bool = False) -> Study:
    """Simulations of a plan, one for every seed; one where nothing is drawn."""
    from rlflow.backends.simulator.report_study import Study
    from rlflow.backends.simulator.run import Options as Simulated
    from rlflow.backends.simulator.run import simulate_seeds

    results = simulate_seeds(plan, Simulated(steps=steps, stated=stated, evaluations=evaluations), seeds)
    return Study(tuple(results), results[0].sampled)


def run(
    source: PathLike | Checked | Plan,
    options: Options | None = None,
    *,
    run_dir: PathLike | None = None,
    steps: int | None = None,
    seed: int | None = None,
    allow_changed: bool = False,
    address: str | None = None,
    progress: bool | Progress = False,
    log: str | Sequence[str] = (),
    keep_checkpoints: int | None = None,
    restarts: int | None = None,
    overrides: Overrides = (),
    flow: str | None = None,
    cluster: str | None = None,
    profile: PathLike | None = None,
) -> Run:
    """Run on Ray, in the folder `run_dir` (`runs/<flow>/<time>-<plan>` if not given), and wait for the end.

    `progress`: True shows it on standard error. `log`, `keep_checkpoints` and `restarts` are options of `rlflow run`.
    Paths of a plan's sources are looked for from the working folder.
    Raises as `compile`, RunFailure where the run fails, RunFolderError for a folder that is in use, KeyboardInterrupt.
    """
    from rlflow import runs

    targets = _targets(log)
    plan = _plan(source, options, overrides, flow, cluster, profile)
    if isinstance(source, Plan) or (not isinstance(source, Checked) and Path(source).suffix == ".json"):
        base_dir = driver.find_base_dir(plan, None if isinstance(source, Plan) else Path(source))
        runs.check_sources(plan, base_dir, allow_changed)
    else:
        base_dir = Path(plan.sources[0].path).parent
    folder = Path(run_dir) if run_dir is not None else runs.default_run_dir(plan)
    runs.open_run_dir(folder, resume=False)
    request = runs.RunRequest(
        plan, base_dir, folder, steps, seed, address=address, log=targets, keep=keep_checkpoints, restarts=restarts
    )
    return _executed(request, progress)


def resume(
    run_dir: PathLike,
    *,
    steps: int | None = None,
    allow_changed: bool = False,
    address: str | None = None,
    progress: bool | Progress = False,
    log: str | Sequence[str] = (),
    keep_checkpoints: int | None = None,
    restarts: int | None = None,
) -> Run:
    """Go on from the newest checkpoint of a run, in its folder, and wait for the end: `rlflow run --resume`.

    `steps`, `log` and `keep_checkpoints` are those of the run unless others are given. Raises as `run`.
    """
    from rlflow import runs

    request = replace(
        runs.resume_request(Path(run_dir), allow_changed=allow_changed),
        steps=steps,
        address=address,
        log=_targets(log),
        keep=keep_checkpoints,
        restarts=restarts,
    )
    return _executed(request, progress)


def _targets(log: str | Sequence[str]) -> tuple[str, ...]:
    from rlflow.sinks.names import sink_names

    return sink_names([log] if isinstance(log, str) else log)


def _executed(request: RunRequest, progress: bool | Progress) -> Run:
    from rlflow import runs

    shown = _progress(progress, request.steps)
    if progress is True:
        shown.start(f"run folder {request.run_dir}")
    try:
        runs.execute(request, shown)
    finally:
        if progress is True:
            shown.stop()
    return Run(request.run_dir)


@dataclass(frozen=True)
class Schedule(Shown):
    """A plan laid out in time: what `simulate` gives."""

    plan: Plan
    study: Study
    """All that was found; `study.first` is the first simulation."""

    @property
    def step_s(self) -> float:
        """Seconds from one step to the next, the mean over seeds."""
        return float(self.study.mean(lambda result: float(result.period) / 1e6).value)

    @property
    def idle(self) -> dict[str, float]:
        """Pool to the share of its time in which no stage runs and nothing moves, in the first simulation."""
        return {name: max(0.0, 1 - use.busy - use.moving) for name, use in self.study.first.pools.items()}

    @property
    def worst_age(self) -> int:
        """Of any sample, in steps."""
        return max(result.worst_age for result in self.study.results)

    @property
    def events(self) -> tuple[Mapping[str, Any], ...]:
        """Every instruction of the first simulation, with `start_us` and `duration_us`; one rank stands for a pool."""
        return self.study.first.events

    def to_json(self) -> dict[str, Any]:
        """As `rlflow simulate --format json` prints it."""
        return self.study.to_json()

    def text(self) -> str:
        """As `rlflow simulate` prints it."""
        from rlflow.backends.simulator.report_text import study_lines

        return "\n".join(study_lines(self.plan, self.study))

    def write_trace(self, path: PathLike) -> None:
        """A Chrome trace of the first simulation."""
        from rlflow.backends.visualizers.trace import write_trace

        write_trace(path, self.events, self.plan)

    def __repr__(self) -> str:
        return f"Schedule(flow={self.plan.flow!r}, step_s={self.step_s:.6g}, worst_age={self.worst_age})"


class Run(Shown):
    """A run folder: of a run that has ended, or goes on. Everything is read when it is asked for."""

    def __init__(self, folder: PathLike) -> None:
        """Raises FileNotFoundError where `folder` is none or has no plan.json."""
        self.folder = Path(folder)
        if not (self.folder / "plan.json").is_file():
            raise FileNotFoundError(2, "not a run folder: no plan.json in it", str(self.folder))

    @cached_property
    def plan(self) -> Plan:
        """The plan that ran. Raises RunFailure RLF4001."""
        return driver.load_plan(self.folder / "plan.json")

    @property
    def facts(self) -> dict[str, Any]:
        """run.json: status, seed, versions, data, sizes; empty before it is written."""
        from rlflow.runs import read_run_json

        return read_run_json(self.folder)

    @property
    def status(self) -> str:
        """`running`, `finished`, `interrupted` or `failed`; a run that was killed stays `running`."""
        return str(self.facts.get("status", "unknown"))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows `{"step": n, "data": {name: value}}`, one for each step and each evaluation."""
        from rlflow.runs import read_metrics

        return read_metrics(self.folder / "metrics.jsonl")

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric, where it was recorded."""
        return [(row["step"], row["data"][name]) for row in self.metrics if name in row["data"]]

    @property
    def step(self) -> int:
        """The last training step that has ended; 0 before the first."""
        return max((row["step"] for row in self.metrics if "training/global_step" in row["data"]), default=0)

    @property
    def flow(self) -> str:
        return str(self.facts.get("flow") or self.plan.flow)

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint."""
        found = [path for path in (self.folder / "checkpoints").glob("global_step_*") if path.name[12:].isdecimal()]
        return max(found, key=lambda path: int(path.name[12:]), default=None)

    def text(self) -> str:
        """How it stands, in a few lines."""
        from rlflow.backends.visualizers.standing import standing_lines

        return "\n".join(standing_lines(self.facts, self.metrics, str(self.folder), str(self.checkpoint or "")))

    def write_trace(self, path: PathLike) -> None:
        """A Chrome trace of what was measured, beside what was planned where the plan knows its times."""
        from rlflow.tracing import trace_of_run

        trace_of_run(self.folder, self.plan).write(Path(path))

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"


def _plan(
    source: PathLike | Checked | Plan,
    options: Options | None,
    overrides: Overrides,
    flow: str | None,
    cluster: str | None,
    profile: PathLike | None,
) -> Plan:
    if not isinstance(source, Plan):
        return compile(source, options, overrides=overrides, flow=flow, cluster=cluster, profile=profile)
    _refuse(_options(options, overrides, flow, cluster, profile), "options apply to a .rlflow file; this is a plan")
    return source


def _options(
    options: Options | None, overrides: Overrides, flow: str | None, cluster: str | None, profile: PathLike | None
) -> Options:
    """The options with what the keywords add. Raises TypeError for overrides of another kind."""
    if isinstance(overrides, str):
        raise TypeError(f'overrides={overrides!r} is one text: write {{"PATH": value}} or ["PATH=VALUE"]')
    pairs = overrides.items() if isinstance(overrides, Mapping) else [text.partition("=")[::2] for text in overrides]
    written = tuple(f"{name}={_value(value)}" for name, value in pairs)
    found = options or Options()
    return replace(
        found,
        overrides=(*found.overrides, *written),
        flow=found.flow if flow is None else flow,
        cluster=found.cluster if cluster is None else cluster,
        profile=found.profile if profile is None else Path(profile),
    )


def _value(value: Any) -> str:
    """A Python value as the language writes it; text stays as it is."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(part) for part in value) + "]"
    return str(value)


def _refuse(options: Options, why: str) -> None:
    if options != Options():
        raise TypeError(why)


def _progress(wanted: bool | Progress, steps: int | None) -> Progress:
    from rich.console import Console

    from rlflow.backends.visualizers.progress import Progress as Shower

    if isinstance(wanted, bool):
        return Shower(steps, Console(stderr=True, quiet=not wanted, highlight=False))
    return wanted
