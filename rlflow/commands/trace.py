"""`rlflow trace RUN_DIR|PLAN|FILE`: a Chrome trace, of a run with its plan beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlflow.commands.options import compile_options, debug_option, plan_of_file, stated_time

if TYPE_CHECKING:
    from rlflow.driver import Options
    from rlflow.tracing import Sides


@click.command()
@click.argument("path", metavar="RUN_DIR|PLAN|FILE", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("trace.json"), show_default=True, help="Where to."
)
@click.option("--steps", type=click.IntRange(min=1), help="The first so many; default: all of a run, 20 of a plan.")
@click.option(
    "--plan",
    "other",
    metavar="PLAN",
    type=click.Path(path_type=Path),
    help="Of a run: lay this plan beside it, such as one that was compiled with a profile since.",
)
@click.option(
    "--stage",
    "stated",
    multiple=True,
    metavar="NAME=SECONDS",
    help="The planned time of a stage, of `reshard MODEL` or of `checkpoint`, in place of the estimate.",
)
@compile_options
@debug_option
def trace(
    path: Path, options: Options, output: Path, steps: int | None, other: Path | None, stated: tuple[str, ...]
) -> None:
    """Write a trace that opens in Perfetto, chrome://tracing and MindStudio Insight.

    Of a run folder: two processes, `planned` (the plan, simulated) and `measured`, which start their first step at one
    time. Of a plan or a .rlflow file: the simulation alone, one process a pool.
    """
    from rlflow import driver, tracing

    times = dict(stated_time(text) for text in stated)
    if output.is_dir():
        raise click.UsageError(f"`{output}` is a folder; give the name of a file")
    if not path.is_dir():
        if other is not None:
            raise click.UsageError("--plan lays a plan beside a run; give the run's folder")
        sides = tracing.trace_of_plan(plan_of_file(path, options), steps or tracing.PLANNED_STEPS, times)
        _write(sides, output, "planned")
        return
    if options != driver.Options():
        raise click.UsageError("--set, --flow, --cluster, --profile apply to a .rlflow file; a run has its plan")
    if not (path / "plan.json").is_file():
        raise click.UsageError(f"`{path}` is not a run folder: it has no plan.json")
    plan = driver.load_plan(other if other is not None else path / "plan.json")
    sides = tracing.trace_of_run(path, plan, steps, times, must_plan=other is not None or bool(times))
    if not sides.measured:
        raise click.UsageError(f"`{path}` has no events in `trace/`: no step has ended, or the run's files were moved")
    if sides.not_planned:
        click.echo(
            f"note: the plan is not in it: {sides.not_planned}; `rlflow compile FILE --profile profile.json` makes a "
            "plan with times, to give with --plan",
            err=True,
        )
    _write(sides, output, "planned and measured" if sides.planned else "measured")


def _write(sides: Sides, output: Path, what: str) -> None:
    building = output.with_name(output.name + ".partial")
    try:
        sides.write(building)
        building.replace(output)
    except OSError:
        building.unlink(missing_ok=True)
        raise
    click.echo(f"wrote {output} ({what}); open it at https://ui.perfetto.dev", err=True)
