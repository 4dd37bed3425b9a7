"""`rlflow graph FILE|PLAN`: the dataflow as a picture, at any stage of its compilation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlflow.commands.options import compile_options, debug_option, plan_of_file, write_file

if TYPE_CHECKING:
    from rlflow.driver import Options
    from rlflow.ir.flow import Flow
    from rlflow.plan import Plan

STAGES = ("logical", "placed", "physical", "scheduled")
TEXTS = ("svg", "dot", "mmd")
IMAGES = ("png", "pdf")


@click.command()
@click.argument("path", metavar="FILE|PLAN", type=click.Path(path_type=Path))
@compile_options
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="File; its ending chooses svg, png, pdf, dot or mmd."
)
@click.option(
    "--format", "format_", type=click.Choice((*TEXTS, *IMAGES)), help="Default: by the file's ending, else mmd."
)
@click.option(
    "--stage",
    type=click.Choice(STAGES),
    default="scheduled",
    show_default=True,
    help="logical: as written. placed: in its pools. physical: with reshards and queues. scheduled: the plan.",
)
@debug_option
def graph(path: Path, options: Options, output: Path | None, format_: str | None, stage: str) -> None:
    """Draw the dataflow: stages in their pools, data, weights, and what the compiler inserted.

    svg, png and pdf are laid out by Graphviz' `dot`; where that is not installed, svg by rlflow itself.
    """
    ending = output.suffix.lstrip(".").lower() if output is not None else ""
    chosen = format_ or ending or "mmd"
    if chosen not in (*TEXTS, *IMAGES):
        known = ", ".join(f".{name}" for name in (*TEXTS, *IMAGES))
        raise click.UsageError(f"`{output}` ends in .{ending}; known are {known} (or give --format)")
    if chosen in IMAGES and output is None and sys.stdout.isatty():
        raise click.UsageError(f"{chosen} is not text: give a file with -o, or send standard output to one")
    drawn = _drawn(path, options, stage)
    data = _image(drawn, chosen) if chosen in IMAGES else _text(drawn, chosen).encode()
    if output is None:
        click.echo(data, nl=False)
    else:
        write_file(output, data)
        click.echo(f"wrote {output}", err=True)


def _drawn(path: Path, options: Options, stage: str) -> Plan | Flow:
    if stage == "scheduled":
        return plan_of_file(path, options)
    if path.suffix == ".json":
        raise click.UsageError(f"--stage {stage}: a plan is what comes last; give the .rlflow file")
    from rlflow import driver
    from rlflow.ir.flow import Stage

    return driver.flow_at(path, Stage[stage.upper()], options)


def _text(drawn: Plan | Flow, chosen: str) -> str:
    from rlflow.backends.visualizers.graph import render_graph, render_svg

    if chosen != "svg":
        return render_graph(drawn, chosen)  # type: ignore[arg-type]
    text, engine = render_svg(drawn)
    if engine != "dot":
        click.echo("note: Graphviz' `dot` is not installed; drawn with the built-in layout", err=True)
    return text


def _image(drawn: Plan | Flow, chosen: str) -> bytes:
    from rlflow.backends.visualizers.graph import NoDot, render_image

    try:
        return render_image(drawn, chosen)  # type: ignore[arg-type]
    except NoDot as error:
        raise click.UsageError(
            f"{chosen} needs Graphviz: {error}; install it (`apt install graphviz`), or ask for svg, which rlflow "
            "draws by itself"
        ) from None
