"""`rlflow report PATH [PATH]`: one HTML page about a plan or a run, or two side by side."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlflow.commands.simulate import stated_time

if TYPE_CHECKING:
    from rlflow.driver import Options
    from rlflow.reports import Simulation

FOLLOW_S = 5
"""Seconds between two pages about a run that goes on."""


@click.command()
@click.argument("paths", metavar="PATH [PATH]", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Steps that are simulated.")
@click.option("--seed", type=int, help="Draw response lengths; without it every stage takes its estimated time.")
@click.option(
    "--stage", "stated", multiple=True, metavar="NAME=SECONDS", help="The time of a stage, in place of the estimate."
)
@click.option("--follow", is_flag=True, help="Of a run folder: write the page again until the run has ended.")
@click.option("--open", "open_", is_flag=True, help="Show the page in a browser.")
@click.option("--set", "-D", "overrides", multiple=True, metavar="PATH=VALUE", help="Replace an argument.")
@click.option("--flow", metavar="NAME", help="Which flow, when the file has several.")
@click.option("--cluster", metavar="NAME", help="Which cluster's schedule.")
@click.option(
    "--profile", metavar="FILE", type=click.Path(path_type=Path), help="Estimate from what `rlflow profile` measured."
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def report(
    paths: tuple[Path, ...],
    output: Path,
    steps: int,
    seed: int | None,
    stated: tuple[str, ...],
    follow: bool,
    open_: bool,
    overrides: tuple[str, ...],
    flow: str | None,
    cluster: str | None,
    profile: Path | None,
    debug: bool,
) -> None:
    """Write one self-contained HTML page: program, graph, placement, timeline, memory, queues, traffic, decisions.

    PATH is a .rlflow file, a plan (.json) or a run folder, whose measurements are laid over the prediction. Two paths
    are compared side by side. The page loads nothing from anywhere.
    """
    from rlflow.driver import Options
    from rlflow.reports import MOST, Simulation, is_running

    gc.enable()  # long simulations make cycles
    if len(paths) > MOST:
        raise click.UsageError(f"{len(paths)} paths; a report is about one, or two side by side")
    options = Options(flow, cluster, overrides, profile)
    if options != Options() and not any(path.suffix == ".rlflow" for path in paths):
        raise click.UsageError("--set, --flow, --cluster, --profile apply to a .rlflow file")
    if output.is_dir():
        raise click.UsageError(f"`{output}` is a folder; give the name of a file")
    if follow and not (len(paths) == 1 and paths[0].is_dir()):
        raise click.UsageError("--follow is of one run folder")
    simulation = Simulation(steps, seed, dict(stated_time(text) for text in stated))
    running = follow and is_running(paths[0])
    _write(paths, options, simulation, output, FOLLOW_S if running else 0)
    click.echo(f"wrote {output}", err=True)
    if open_:
        import webbrowser

        webbrowser.open(output.resolve().as_uri())
    while running:
        time.sleep(FOLLOW_S)
        running = is_running(paths[0])
        _write(paths, options, simulation, output, FOLLOW_S if running else 0)


def _write(paths: tuple[Path, ...], options: Options, simulation: Simulation, output: Path, refresh_s: int) -> None:
    """Through a temporary name, so that a failure leaves the old page, and a browser never reads half of one."""
    from rlflow.diagnostics.render import render
    from rlflow.reports import gather, page

    subjects = gather(paths, options, simulation)
    for subject in subjects:
        if subject.diagnostics:
            click.echo(render(list(subject.diagnostics), "full", color=sys.stderr.isatty()), err=True)
    building = output.with_name(output.name + ".partial")
    try:
        building.write_text(page(subjects, refresh_s), "utf-8")
        building.replace(output)
    except OSError:
        building.unlink(missing_ok=True)
        raise
