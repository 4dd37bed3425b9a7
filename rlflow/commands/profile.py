"""`rlflow profile FILE`: measure what the stages of a flow take on this machine."""

from __future__ import annotations

import gc
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlflow.commands.options import lengths_option

if TYPE_CHECKING:
    from rlflow.driver import Checked, Options
    from rlflow.profile.table import Profile

STEPS = 20


@click.command()
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--steps",
    type=click.IntRange(min=3),
    default=STEPS,
    show_default=True,
    help="Training steps that are run; the first two are a warm-up.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("profile.json"), show_default=True, help="Where to."
)
@click.option("--run-dir", type=click.Path(path_type=Path), help="Keep the run that is measured in this folder.")
@click.option("--set", "-D", "overrides", multiple=True, metavar="PATH=VALUE", help="Replace an argument.")
@click.option("--flow", metavar="NAME", help="Which flow, when the file has several.")
@click.option("--cluster", metavar="NAME", help="Which cluster's schedule; `local` = this machine.")
@lengths_option
@click.option("--plain", is_flag=True, help="One line a step, even on a terminal.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def profile(
    path: Path,
    steps: int,
    output: Path,
    run_dir: Path | None,
    overrides: tuple[str, ...],
    flow: str | None,
    cluster: str | None,
    lengths: str,
    plain: bool,
    debug: bool,
) -> None:
    """Run a flow for a few steps on this machine and write what its stages take.

    The other verbs estimate from the file with --profile. What is trained meanwhile is thrown away.
    """
    from rlflow import driver
    from rlflow.diagnostics.render import render

    if path.suffix == ".json":
        raise click.UsageError("give the .rlflow file: a profile is compared with the flow that it is used for")
    if output.is_dir():
        raise click.UsageError(f"`{output}` is a folder; give the name of a file")
    if not output.absolute().parent.is_dir():
        raise click.UsageError(f"the folder of `{output}` is not there")
    options = driver.Options(flow, cluster, overrides)
    checked = driver.check(path, options)
    if checked.warnings:
        click.echo(render(list(checked.warnings), "full", color=sys.stderr.isatty()), err=True)
    found = _measure(checked, options, run_dir, steps, lengths, plain)
    special = output.exists() and not output.is_file()  # a pipe or a device is written to and stays what it is
    building = output if special else output.with_name(output.name + ".partial")
    try:
        building.write_text(found.to_json(), "utf-8")
        if not special:
            building.replace(output)
    except OSError:
        if not special:
            building.unlink(missing_ok=True)
        raise
    click.echo("\n".join(_lines(found, _predicted(checked, options, output))))
    click.echo(f"wrote {output}; estimate with it: rlflow show {path} --profile {output}", err=True)


def _measure(
    checked: Checked, options: Options, run_dir: Path | None, steps: int, lengths: str, plain: bool
) -> Profile:
    from rich.console import Console

    from rlflow import profiler, runs
    from rlflow.backends.visualizers.progress import Progress

    gc.enable()  # a run lasts
    progress = Progress(steps, Console(stderr=True, highlight=False, force_terminal=False if plain else None))
    with tempfile.TemporaryDirectory(prefix="rlflow-profile-") as scratch:
        folder = run_dir if run_dir is not None else Path(scratch)
        try:
            runs.open_run_dir(folder, resume=False)
        except runs.RunFolderError as error:
            raise click.UsageError(str(error)) from None
        progress.start(f"measuring {steps} steps")
        try:
            return profiler.profile(checked, options, folder, steps, progress, lengths)
        finally:
            progress.stop()


def _predicted(checked: Checked, options: Options, output: Path) -> int | None:
    """Microseconds of a step by the stages alone, as every other verb will estimate them."""
    from rlflow import driver

    cadence = driver.compile(checked.path, replace(options, profile=output)).cadence
    return None if cadence is None else cadence.us


def _lines(found: Profile, predicted: int | None) -> list[str]:
    """A table of the profile: medians with their quartiles, and rates."""
    from rlflow.amounts import seconds

    rows = [("stage", "median", "quartiles", "a row", "a token")]
    for entry in found.stages:
        rows.append(
            (
                entry.stage + ("" if entry.phase == "step" else f" [{entry.phase}]"),
                seconds(entry.us),
                f"{seconds(entry.low_us)} .. {seconds(entry.high_us)}",
                "" if entry.us_per_row is None else f"{entry.us_per_row:.4g} us",
                "" if entry.us_per_token is None else f"{entry.us_per_token:.4g} us",
            )
        )
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, wide, strict=True)).rstrip() for row in rows]
    spread = f"{seconds(found.step_low_us)} .. {seconds(found.step_high_us)}"
    lines.append(f"a step: {seconds(found.step_us)} ({spread}), {found.steps - found.warm_up} steps measured")
    if predicted is not None:
        apart = predicted / found.step_us - 1 if found.step_us else 0.0
        lines.append(f"from the stages alone: {seconds(predicted)} ({apart:+.0%})")
    return lines
