"""`rlflow simulate PLAN`: what a plan does over many steps, in virtual time."""

from __future__ import annotations

import gc
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlflow.commands.options import plan_of_file
from rlflow.commands.options import stated_time as stated_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlflow.backends.simulator.failures import Failures
    from rlflow.backends.simulator.report_study import Study
    from rlflow.backends.simulator.run import Options as Asked
    from rlflow.plan import Plan

_BRACKETS = {"(": ")", "[": "]"}


@click.command()
@click.argument("path", metavar="FILE|PLAN", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Steps that are measured.")
@click.option(
    "--seeds",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Draw response lengths, so many times. 0: every stage takes the time of its estimate.",
)
@click.option(
    "--stage",
    "stated",
    multiple=True,
    metavar="NAME=SECONDS",
    help="The time of a stage, of `reshard MODEL` or of `checkpoint`, in place of the estimate.",
)
@click.option(
    "--headroom",
    type=click.IntRange(min=0),
    metavar="TOKENS",
    help="Room in the cache that engines keep for every response when they admit another. 0: none, as vLLM. Otherwise "
    "what a running response has on average, and none where all samples fit at once.",
)
@click.option(
    "--keep",
    "kept",
    multiple=True,
    metavar="NAME=SHARE",
    help="How many groups a `mixed_groups` stage keeps, such as kept=60%; for the others it samples further prompts.",
)
@click.option(
    "--fail",
    "failing",
    multiple=True,
    metavar="NAME=SHARE",
    help="How many of the tries of a reward stage to score a sample fail, such as score=2%.",
)
@click.option(
    "--turn",
    "waits",
    multiple=True,
    metavar="NAME=SECONDS",
    help="What the environment of a generate stage takes between two turns, on average.",
)
@click.option(
    "--migrate",
    "migrating",
    multiple=True,
    metavar="NAME=SHARE",
    help="When so few samples of a generate stage's batch are left, such as samples=20%, they move to few engines, and "
    "the other devices begin the next stages.",
)
@click.option(
    "--mtbf",
    type=click.FloatRange(min=0, min_open=True),
    metavar="HOURS",
    help="Hosts fail, each once in so many hours on average; a failed run is resumed from its last checkpoint.",
)
@click.option(
    "--restart",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="From a failure to the first step of the resumed run.",
)
@click.option("--evaluations", is_flag=True, help="Run the evaluations too.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a Chrome trace of the (first) simulation.")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="PATH=A,B,...",
    help="Compile with each value, as `--set` does, and print a table. Several: every combination.",
)
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw what --sweep finds.")
@click.option("--set", "-D", "overrides", multiple=True, metavar="PATH=VALUE", help="Replace an argument.")
@click.option("--flow", metavar="NAME", help="Which flow, when the file has several.")
@click.option("--cluster", metavar="NAME", help="Which cluster's schedule.")
@click.option(
    "--profile", metavar="FILE", type=click.Path(path_type=Path), help="Estimate from what `rlflow profile` measured."
)
@click.option("--format", "format_", type=click.Choice(("text", "json")), default="text")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def simulate(
    path: Path,
    steps: int,
    seeds: int,
    stated: tuple[str, ...],
    headroom: int | None,
    kept: tuple[str, ...],
    failing: tuple[str, ...],
    waits: tuple[str, ...],
    migrating: tuple[str, ...],
    mtbf: float | None,
    restart: float,
    evaluations: bool,
    trace: Path | None,
    sweeps: tuple[str, ...],
    plot: Path | None,
    overrides: tuple[str, ...],
    flow: str | None,
    cluster: str | None,
    profile: Path | None,
    format_: str,
    debug: bool,
) -> None:
    """Run a plan in virtual time: step time, idle devices, ages of samples, traffic.

    The pools walk the same instruction lists as in a run, with the same rules of admission. With --seeds generate
    stages run sample by sample on simulated engines.
    """
    from rlflow.backends.simulator.failures import Failures
    from rlflow.backends.simulator.report_text import study_lines, sweep_lines
    from rlflow.backends.simulator.run import Options as Asked
    from rlflow.backends.visualizers.trace import write_trace
    from rlflow.commands.sweep_plot import check_plot, write_plot
    from rlflow.driver import Options

    gc.enable()  # long simulations make cycles
    if headroom is not None and not seeds:
        raise click.UsageError("--headroom is of engines that run sample by sample; add --seeds N")
    if migrating and not seeds:
        raise click.UsageError("--migrate moves samples that are generated one by one; add --seeds N")
    asked = Asked(
        steps=steps,
        stated=dict(stated_time(text) for text in stated),
        headroom=headroom,
        keep=dict(_share(text, "--keep") for text in kept),
        failing=dict(_share(text, "--fail") for text in failing),
        turns=dict(stated_time(text, "--turn") for text in waits),
        migrate=dict(_share(text, "--migrate") for text in migrating),
        evaluations=evaluations,
    )
    failures = None if mtbf is None else Failures(mtbf * 3600, restart)
    options = Options(flow, cluster, overrides, profile)
    if path.suffix == ".json" and (overrides or flow or cluster or profile or sweeps):
        raise click.UsageError(
            "--set, --sweep, --flow, --cluster, --profile apply to a .rlflow file; this is a plan already"
        )
    if plot is not None:
        check_plot(plot, sweeps)
    if sweeps:
        if trace is not None:
            raise click.UsageError("--trace is of one plan; leave --sweep out")
        columns, rows = _sweep(path, sweeps, options, asked, seeds, failures)
        if format_ == "json":
            found = [
                {"set": dict(zip(columns, values, strict=True))}
                | ({"error": study} if isinstance(study, str) else study.to_json())
                for values, study in rows
            ]
            click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        else:
            click.echo("\n".join(sweep_lines(columns, rows)))
        if plot is not None:
            write_plot(plot, f"{path.stem} over {', '.join(columns)}", columns, rows)
            click.echo(f"wrote {plot}", err=True)
        if all(isinstance(study, str) for _, study in rows):
            raise SystemExit(1)
        return
    plan = plan_of_file(path, options)
    study = _study(plan, asked, seeds, failures)
    if trace is not None:
        write_trace(trace, study.first.events, plan)
        click.echo(f"wrote {trace}", err=True)
    if format_ == "json":
        click.echo(json.dumps(study.to_json(), indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(study_lines(plan, study)))


def _study(plan: Plan, asked: Asked, seeds: int, failures: Failures | None) -> Study:
    from rlflow.backends.simulator.failures import forecast
    from rlflow.backends.simulator.report_study import Study
    from rlflow.backends.simulator.run import seeds_of, simulate, simulate_seeds
    from rlflow.stage_times import CHECKPOINT

    results = simulate_seeds(plan, asked, seeds)
    if seeds and not results[0].sampled:
        click.echo("no lengths are drawn: of no generate stage is anything known but its time", err=True)
    failing = None
    if failures is not None:
        written = asked.stated.get(CHECKPOINT, 0.0)
        still = replace(asked, stated={**asked.stated, CHECKPOINT: 0.0})
        bare = (
            [simulate(plan, replace(still, seed=seed)) for seed in seeds_of(plan, seeds)[: len(results)]]
            if written
            else results
        )
        failing = forecast(plan, results, bare, failures, written)
    return Study(tuple(results), results[0].sampled, failing)


def _sweep(
    path: Path, sweeps: Sequence[str], options: object, asked: Asked, seeds: int, failures: Failures | None
) -> tuple[list[str], list[tuple[tuple[str, ...], Study | str]]]:
    """Names of the columns, and a study or what is wrong for every combination of values."""
    from rlflow import driver
    from rlflow.diagnostics import CompileError, RunFailure, Severity

    assert isinstance(options, driver.Options)
    columns, choices = [], []
    for text in sweeps:
        name, equals, values = text.partition("=")
        if not equals or not name.strip() or not values.strip():
            raise click.UsageError(f"--sweep {text}: write PATH=A,B,...")
        columns.append(name.strip())
        choices.append(_values(values))
    rows: list[tuple[tuple[str, ...], Study | str]] = []
    for chosen in itertools.product(*choices):
        swept = tuple(f"{name}={value}" for name, value in zip(columns, chosen, strict=True))
        changed = replace(options, overrides=(*options.overrides, *swept))
        try:
            rows.append((chosen, _study(driver.compile(path, changed), asked, seeds, failures)))
        except CompileError as error:
            first = next(d for d in error.diagnostics if d.severity is Severity.ERROR)
            rows.append((chosen, f"error[{first.code}]: {first.message}"))
        except RunFailure as failure:
            rows.append((chosen, f"error[{failure.code}]: {failure.message}"))
    return columns, rows


def _values(text: str) -> list[str]:
    """Parts between commas that are in no brackets."""
    found, depth = [""], 0
    for character in text:
        depth += (character in _BRACKETS) - (character in _BRACKETS.values())
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [value.strip() for value in found]


def _share(text: str, option: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        share = float(number.strip().removesuffix("%")) / (100 if number.strip().endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not name.strip() or not 0 < share <= 1:
        raise click.UsageError(f"{option} {text}: write NAME=SHARE, with a share above 0 and at most 100%")
    return name.strip(), share
