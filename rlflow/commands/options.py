"""What several verbs share: options, the plan of a file, and writing a result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import click

if TYPE_CHECKING:
    from rlflow.driver import Options
    from rlflow.plan import Plan

P = ParamSpec("P")


def compile_options(command: Callable[P, None]) -> Callable[P, None]:
    """Options of every verb that compiles; they reach the command as `options`."""

    @click.option(
        "--set",
        "-D",
        "overrides",
        multiple=True,
        metavar="PATH=VALUE",
        help="Replace an argument, as in batch.count=8.",
    )
    @click.option("--flow", metavar="NAME", help="Which flow, when the file has several.")
    @click.option("--cluster", metavar="NAME", help="Which cluster's schedule; `local` = this machine.")
    @click.option(
        "--profile",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Estimate from what `rlflow profile` measured.",
    )
    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        from rlflow.driver import Options

        chosen = (kwargs.pop("flow"), kwargs.pop("cluster"), tuple(kwargs.pop("overrides")), kwargs.pop("profile"))
        options = Options(*chosen)
        command(*args, options=options, **kwargs)  # type: ignore[arg-type]

    return wrapped


lengths_option = click.option(
    "--lengths",
    default="",
    metavar="DISTRIBUTION",
    help="For benchmarks: draws end the responses of a step, not the model. lognormal(MEAN, SIGMA) or fixed(TOKENS).",
)


def debug_option(command: Callable[P, None]) -> Callable[P, None]:
    @click.option("--debug", is_flag=True, help="Show tracebacks.")
    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        kwargs.pop("debug")
        command(*args, **kwargs)

    return wrapped


def plan_of_file(path: Path, options: Options) -> Plan:
    """The plan of a .rlflow file, or the plan that a .json file holds. Warnings go to standard error."""
    from rlflow import driver
    from rlflow.diagnostics.render import render

    if path.suffix == ".json":
        if options != type(options)():
            raise click.UsageError(
                "--set, --flow, --cluster, --profile apply to a .rlflow file; this is a plan already"
            )
        return driver.load_plan(path)
    checked = driver.check(path, options)
    if checked.warnings:
        color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        click.echo(render(list(checked.warnings), "full", color=color), err=True)
        if len(checked.warnings) > 1:
            from rlflow.diagnostics.render import summary_line

            click.echo(f"\n{summary_line(list(checked.warnings))}", err=True)
    return driver.plan_of(checked, options)


def write_file(path: Path, content: str | bytes) -> None:
    """Write through a temporary name, so that a failure leaves the old file. What is no file, such as a pipe or
    /dev/null, is written to and stays what it is."""
    if path.is_dir():
        raise click.UsageError(f"`{path}` is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    building = path.with_name(path.name + ".partial")
    try:
        building.write_bytes(content.encode() if isinstance(content, str) else content)
        building.replace(path)
    except OSError:
        building.unlink(missing_ok=True)
        raise


def stated_time(text: str, option: str = "--stage") -> tuple[str, float]:
    """`NAME=SECONDS` of an option."""
    name, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not name.strip() or not 0 <= value < float("inf"):
        raise click.UsageError(f"{option} {text}: write NAME=SECONDS, with seconds of at least 0")
    return name.strip(), value
