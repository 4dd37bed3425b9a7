"""`rlflow watch RUN_DIR`: follow a run that goes on elsewhere, or look at one that has ended."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlflow.commands.options import debug_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlflow.backends.visualizers.progress import Progress
    from rlflow.follow import Follower

QUIET_AFTER_S = 60.0
"""Without a new row: then it is said for how long. And more than QUIET_STEPS steps."""
QUIET_STEPS = 5


@click.command()
@click.argument("run_dir", metavar="[RUN_DIR]", type=click.Path(path_type=Path), required=False)
@click.option("--every", type=click.FloatRange(min=0.05), default=1.0, show_default=True, help="Seconds between looks.")
@click.option("--once", is_flag=True, help="Say how it stands now, and end.")
@click.option("--plain", is_flag=True, help="One line a step, even on a terminal.")
@click.option("--format", "format_", type=click.Choice(("text", "json")), default="text", help="json: as --once.")
@debug_option
def watch(run_dir: Path | None, every: float, once: bool, plain: bool, format_: str) -> None:
    """Show a run as it goes on: step, reward, times, idle pools, queues, ages, time left.

    RUN_DIR is a run's folder, of this or another process; without it, the newest below `runs/`. Ends with the run, or
    with Ctrl-C, which leaves the run alone. The exit code is 1 for a run that has failed.
    """
    from rlflow.follow import Follower, newest_run

    folder = run_dir if run_dir is not None else newest_run(Path("runs"))
    if folder is None:
        raise click.UsageError("there is no run below `runs/`; give a run's folder")
    if not (folder / "plan.json").is_file():
        raise click.UsageError(f"`{folder}` is not a run folder: it has no plan.json")
    follower = Follower(folder)
    rows: list[dict[str, Any]] = []
    if not once and format_ == "text":
        try:
            _follow(follower, rows, every, plain)
        except KeyboardInterrupt:
            click.echo("left; the run is not touched", err=True)
            return
    rows += follower.rows()
    facts = follower.facts()
    if format_ == "json":
        click.echo(json.dumps(_standing(follower, facts, rows), indent=2, ensure_ascii=False))
    else:
        _closing(folder, facts, rows)
    if facts.get("status") == "failed":
        raise SystemExit(1)


def _follow(follower: Follower, rows: list[dict[str, Any]], every: float, plain: bool) -> None:
    """Show rows until the run has ended; they are added to `rows`."""
    from rich.console import Console

    from rlflow.backends.visualizers.progress import Progress, duration
    from rlflow.follow import RUNNING

    facts = follower.facts()
    console = Console(stderr=True, highlight=False, force_terminal=False if plain else None)
    progress = Progress(_total(facts), console)
    progress.title = f"rlflow watch {follower.run_dir}"
    progress.capacities = _capacities(follower.run_dir)
    progress.start("waiting for the first step", since=_elapsed(facts))
    shown = 0
    try:
        while True:
            facts = follower.facts()  # before the rows: the last rows are written before the end is
            progress.total_steps = _total(facts)
            fresh = follower.rows()
            rows += fresh
            shown = _show(progress, fresh, shown)
            if facts and facts.get("status") != RUNNING:
                return
            quiet = follower.quiet_seconds(time.time())
            late = quiet > max(QUIET_AFTER_S, QUIET_STEPS * progress.step_seconds)
            progress.note = f"nothing new for {duration(quiet)}: the run may have been killed" if late else ""
            time.sleep(every)
    finally:
        progress.note = ""
        progress.stop()


def _show(progress: Progress, fresh: Sequence[dict[str, Any]], shown: int) -> int:
    """Give rows to the display; the last step that it has. A run that was resumed says so."""
    from rlflow.backends.visualizers.flow_metrics import is_step

    for row in fresh:
        step = row["step"]
        if is_step(row["data"]):
            if step <= shown:
                progress.message(f"resumed: step {step} again")
            shown = step
        progress.step(step, row["data"])
    return shown


def _total(facts: dict[str, Any]) -> int | None:
    steps = facts.get("steps")
    return steps if isinstance(steps, int) and not isinstance(steps, bool) else None


def _elapsed(facts: dict[str, Any]) -> float:
    """Seconds since the run was started, by its run.json; 0 where that does not say."""
    try:
        began = time.mktime(time.strptime(str(facts["started"])[:19], "%Y-%m-%dT%H:%M:%S"))
    except (KeyError, ValueError, OverflowError):
        return 0.0
    return max(0.0, time.time() - began)


def _capacities(run_dir: Path) -> dict[str, int]:
    """Batches that every queue of the run's plan holds."""
    from rlflow import driver

    return {queue.id: queue.capacity for queue in driver.load_plan(run_dir / "plan.json").queues}


def _standing(follower: Follower, facts: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How the run stands, for a program. Values of metrics that are not finite numbers are null."""
    from rlflow.api import Run
    from rlflow.backends.visualizers.flow_metrics import is_step, number

    steps = [row for row in rows if is_step(row["data"])]
    last: dict[str, Any] = steps[-1] if steps else {"step": 0, "data": {}}
    checkpoint = Run(follower.run_dir).checkpoint
    return {
        "folder": str(follower.run_dir),
        "flow": facts.get("flow"),
        "status": facts.get("status", "not started"),
        "step": last["step"],
        "steps": _total(facts),
        "quiet_s": round(follower.quiet_seconds(time.time()), 3),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "metrics": {name: number(value) for name, value in sorted(last["data"].items())},
    }


def _closing(folder: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    from rlflow.api import Run
    from rlflow.backends.visualizers.standing import standing_lines

    click.echo("\n".join(standing_lines(facts, rows, str(folder), str(Run(folder).checkpoint or ""))))
