"""A report: what is known about plans and runs, gathered for one HTML page."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow import driver
from rlflow.diagnostics import RunFailure
from rlflow.driver import Options
from rlflow.runs import read_events, read_metrics

if TYPE_CHECKING:
    from rlflow.backends.simulator.report import Result
    from rlflow.backends.visualizers.report.subject import Ran, Simulated, Subject
    from rlflow.plan import Plan
    from rlflow.profile.table import Profile

MOST = 2
"""Plans or runs side by side."""


@dataclass(frozen=True)
class Simulation:
    """How the plans are simulated for the report; as the options of `rlflow simulate`."""

    steps: int = 20
    seed: int | None = None
    """Draws response lengths; None: every stage takes the time of its estimate."""
    stated: Mapping[str, float] | None = None
    """Seconds of stages, in place of the estimates."""


def report(
    paths: str | Path | Sequence[str | Path],
    options: Options | None = None,
    simulation: Simulation | None = None,
) -> str:
    """The page about one or two .rlflow files, plans or run folders, as HTML text; `options` are for .rlflow files.

    Raises CompileError, RunFailure (RLF4001 for what is neither a plan nor a run folder), OSError; ValueError for
    another number of paths.
    """
    found = [paths] if isinstance(paths, str | Path) else paths
    return page(gather(found, options, simulation))


def gather(
    paths: Sequence[str | Path], options: Options | None = None, simulation: Simulation | None = None
) -> list[Subject]:
    """What is known about every path. Raises as `report` does."""
    if not 1 <= len(paths) <= MOST:
        raise ValueError(f"{len(paths)} paths: a report is about one, or two side by side")
    return [_subject(Path(path), options or Options(), simulation or Simulation()) for path in paths]


def page(subjects: Sequence[Subject], refresh_s: int = 0) -> str:
    """The page as HTML text; `refresh_s` > 0: it loads itself again after so many seconds."""
    from rlflow.backends.visualizers.report.page import render_report

    return render_report(subjects, _differences([subject.plan for subject in subjects]), refresh_s)


def is_running(folder: Path) -> bool:
    """Whether a run folder says that its run goes on."""
    return _facts(folder).get("status") == "running"


def _subject(path: Path, options: Options, simulation: Simulation) -> Subject:
    from rlflow.backends.visualizers.report.subject import Subject

    ran, warnings = None, None
    if path.is_dir():
        plan, ran = driver.load_plan(_plan_of_run(path)), _ran(path)
    elif path.suffix == ".json":
        plan = driver.load_plan(path)
    else:
        checked = driver.check(path, options)
        plan, warnings = driver.plan_of(checked, options), checked.warnings
    simulated, why = _simulated(plan, simulation)
    texts, gone = _texts(plan, path)
    return Subject(path.as_posix(), plan, texts, gone, warnings, simulated, why, _profile(plan), ran)


def _profile(plan: Plan) -> Profile | None:
    """The profile of the plan, if it is where the plan says and has not changed."""
    from rlflow.profile.read import read_profile

    if plan.profile is None or not driver.is_unchanged(Path(plan.profile.path), plan.profile.sha256):
        return None
    return read_profile(Path(plan.profile.path))


def _plan_of_run(folder: Path) -> Path:
    plan = folder / "plan.json"
    if not plan.is_file():
        raise RunFailure(
            "RLF4001",
            f"`{folder}` is not a run folder: it has no plan.json",
            help=("give a folder that `rlflow run` made, a plan (.json) or a .rlflow file",),
        )
    return plan


def _ran(folder: Path) -> Ran:
    from rlflow.backends.visualizers.report.subject import Ran

    events = [event for event in read_events(folder) if _is_event(event)]
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if _is_row(row)]
    return Ran(folder.as_posix(), _facts(folder), rows, events)


def _facts(folder: Path) -> dict[str, Any]:
    """run.json; empty where it is not there, or half written."""
    try:
        facts: Any = json.loads((folder / "run.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


_NUMBERS = ("rank", "step", "start_us", "duration_us")


def _is_event(event: Any) -> bool:
    """Whether a line of a trace has what a bar needs; others come from writers that were cut off."""
    if not isinstance(event, dict):
        return False
    numbers = (*_NUMBERS, "result_us") if event.get("kind") == "call" else _NUMBERS
    optional = (event.get("version"), event.get("tokens"))
    return (
        all(_is_number(event.get(key)) for key in numbers)
        and all(value is None or _is_number(value) for value in optional)
        and all(isinstance(event.get(key), str) for key in ("pool", "instruction", "stage", "kind"))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("data"), dict)


def _simulated(plan: Plan, simulation: Simulation) -> tuple[Simulated | None, str]:
    """What a simulation finds, or why there is none."""
    from rlflow.backends.simulator.run import Options as Simulate
    from rlflow.backends.simulator.run import simulate

    try:
        found = simulate(
            plan, Simulate(steps=simulation.steps, seed=simulation.seed, stated=dict(simulation.stated or {}))
        )
    except RunFailure as failure:
        if failure.code != "RLF4004" or simulation.stated:  # a stage's time is not known: the rest is worth a page
            raise
        return None, "; ".join([f"{failure.code}: {failure.message}", *failure.notes])
    return _as_simulated(found), ""


def _as_simulated(found: Result) -> Simulated:
    from rlflow.backends.visualizers.report.subject import Simulated

    return Simulated(
        events=found.events,
        ends=[float(end) for end in found.ends],
        warm_up=found.warm_up,
        period_us=float(found.period),
        bubble=found.bubble,
        tokens_per_second=found.tokens_per_second,
        sampled=found.sampled,
        uses={name: (use.busy, use.moving) for name, use in found.pools.items()},
        work={name: [(float(a), float(b), share) for a, b, share in own] for name, own in found.work.items()},
        depths={name: [(float(time), depth) for time, depth in own] for name, own in found.depths.items()},
        ages=found.ages_by_step,
        promised=found.promised,
        uncounted=found.uncounted,
    )


def _texts(plan: Plan, path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Text of every .rlflow source that is as it was when the plan was made, and why others have none."""
    sources = [source.path for source in plan.sources if source.path.endswith(".rlflow")]
    try:
        base = Path(plan.sources[0].path).parent if path.suffix == ".rlflow" else driver.find_base_dir(plan, path)
    except RunFailure as failure:
        return {}, {source: failure.message for source in sources}
    changed = set(driver.changed_sources(plan, base))
    texts, gone = {}, {}
    for source in sources:
        if source in changed:
            gone[source] = f"{source} is not what the plan was made from: it is missing, or has changed since"
            continue
        try:
            texts[source] = driver.source_path(plan, base, source).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            gone[source] = f"{source} cannot be read: {error}"
    return texts, gone


def _differences(plans: Sequence[Plan]) -> list[Any]:
    """What two plans decide differently. Spans and sources are left out, and hosts are counted rather than listed."""
    if len(plans) < 2:
        return []
    from rlflow.backends.visualizers.report.page import Difference
    from rlflow.plan_diff import plan_changes

    found, hosts = [], Counter[str]()
    for change in plan_changes(plans[0], plans[1]):
        pool, is_host, _ = change.path.partition(".hosts.")
        if change.section == "sources":
            continue
        if is_host:
            hosts[pool] += 1
            continue
        where = change.path.removeprefix(change.section).removeprefix(".") or change.section
        found.append(Difference(change.section, where, _words(change.before), _words(change.after)))
    for pool, count in hosts.items():
        words = f"{count} host{'s' * (count != 1)} with another number of its devices"
        found.append(Difference("pools", f"{pool.removeprefix('pools')}.hosts", "", words))
    return found


_MOST_TEXT = 160
"""Characters of one value."""


def _words(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"
