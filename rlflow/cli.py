"""The command line: verbs to driver. The only place that prints and exits.

Exit codes: 0 ok · 1 problems found, plan refused or run failed · 2 usage or files · 70 internal error · 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import click

from rlflow import __version__
from rlflow.commands.diff import diff
from rlflow.commands.explain import explain
from rlflow.commands.fmt import fmt
from rlflow.commands.init import init
from rlflow.commands.profile import profile
from rlflow.commands.simulate import simulate
from rlflow.diagnostics import CompileError, Diagnostic, Label, RunFailure, SourceFile, Span
from rlflow.diagnostics.render import FORMATS, MACHINE_FORMATS, render, summary_line

if TYPE_CHECKING:
    from rich.console import Console

    from rlflow.driver import Options
    from rlflow.plan import Plan

P = ParamSpec("P")

_SOURCE = click.argument("path", metavar="FILE", type=click.Path(path_type=Path))


def main(argv: list[str] | None = None) -> None:
    """Entry point; always ends in SystemExit."""
    debug = "--debug" in (sys.argv[1:] if argv is None else argv)
    try:
        with _uncollected(), _problems(debug):
            cli.main(args=argv, prog_name="rlflow", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        raise SystemExit(2) from None
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        raise SystemExit(130) from None
    raise SystemExit(0)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles: compiling makes many values and hardly a cycle, and soon ends."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _problems(debug: bool) -> Iterator[None]:
    """Turn what the driver raises into text and an exit code; a traceback only with --debug."""
    try:
        yield
    except CompileError as error:
        _print_diagnostics(error.diagnostics, _format_in_force())
        raise SystemExit(1) from None
    except RunFailure as failure:
        if debug and failure.trace:
            click.echo(failure.trace, err=True)
        _print_diagnostics([failure.to_diagnostic(_stage_labels(failure))], _format_in_force())
        raise SystemExit(1) from None
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # The reader has gone; nothing can be said to it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(0) from None
        if debug:
            raise
        name = f" `{error.filename}`" if error.filename else ""
        click.echo(f"rlflow: {error.strerror or error}{name}", err=True)
        raise SystemExit(2) from None
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except Exception as error:
        from rlflow.passes.pipeline import InternalError

        if debug:
            raise
        if isinstance(error, InternalError):
            path = Path("rlflow-internal-error.rlir")
            with contextlib.suppress(OSError):
                path.write_text(error.flow_text, "utf-8")
            message = f"{error}\nThis is a bug of rlflow. The last sound flow is in `{path}`."
            click.echo(f"error[RLF9001]: {message}", err=True)
            raise SystemExit(70) from None
        message = f"error[RLF9001]: {type(error).__name__}: {error}"
        click.echo(f"{message}\nThis is a bug of rlflow; `--debug` shows where.", err=True)
        raise SystemExit(70) from None


_state: dict[str, Any] = {}


def _format_in_force() -> str:
    return str(_state.get("format") or "full")


def _stage_labels(failure: RunFailure) -> tuple[Label, ...]:
    """Where the failed stage was written, when the plan's source is still there to show."""
    plan: Plan | None = _state.get("plan")
    if plan is None or not failure.stage:
        return ()
    try:
        span = plan.stage(failure.stage).because.span
        file = SourceFile(span.file, Path(span.file).read_text("utf-8"))
    except (KeyError, OSError, UnicodeDecodeError):
        return ()
    offsets = []
    for line, column in ((span.line, span.column), (span.end_line, span.end_column)):
        start = sum(len(text) + 1 for text in file.text.split("\n")[: line - 1])
        offsets.append(start + column - 1)
    return (Label(Span(file, offsets[0], offsets[1])),)


def _print_diagnostics(diagnostics: Any, format: str) -> None:
    found: list[Diagnostic] = list(diagnostics)
    if format in MACHINE_FORMATS:
        if found or format != "github":
            click.echo(render(found, format, path=_state.get("path")))
        return
    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    if found:
        click.echo(render(found, format, color=color), err=True)
    if len(found) > 1 and format == "full":
        click.echo(f"\n{summary_line(found)}", err=True)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


# --- shared options --------------------------------------------------------------------------------------------------


def _compile_options(command: Callable[P, None]) -> Callable[P, None]:
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


def _debug_option(command: Callable[P, None]) -> Callable[P, None]:
    @click.option("--debug", is_flag=True, help="Show tracebacks.")
    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        kwargs.pop("debug")
        command(*args, **kwargs)

    return wrapped


def _compiled(path: Path, options: Options) -> Plan:
    """The plan of a .rlflow file, or the plan that a .json file holds. Warnings are printed."""
    from rlflow import driver

    if path.suffix == ".json":
        if options != type(options)():
            raise click.UsageError(
                "--set, --flow, --cluster, --profile apply to a .rlflow file; this is a plan already"
            )
        plan = driver.load_plan(path)
    else:
        checked = driver.check(path, options)
        _print_diagnostics(checked.warnings, "full")
        plan = driver.plan_of(checked, options)
    _state["plan"] = plan
    return plan


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rlflow")
def cli() -> None:
    """Write, compile, see and run reinforcement-learning workflows for language models."""
    _state.clear()


for verb in (diff, explain, fmt, init, profile, simulate):
    cli.add_command(verb)


# --- verbs -----------------------------------------------------------------------------------------------------------


@cli.command()
@_SOURCE
@_compile_options
@click.option("--format", "format_", type=click.Choice(FORMATS), default="full", help="How problems are written.")
@_debug_option
def check(path: Path, options: Options, format_: str) -> None:
    """Find every mistake that can be found without running anything."""
    from rlflow import driver

    _state["format"], _state["path"] = format_, path.as_posix()
    checked = driver.check(path, options)
    _print_diagnostics(checked.warnings, format_)
    if format_ == "full":
        step = sum(1 for node in checked.flow.nodes.values() if node.phase == "step")
        click.echo(
            f"{path}: flow `{checked.flow.name}` is sound ({step} stages on cluster `{checked.lowered.cluster.name}`)"
        )


@cli.command()
@_SOURCE
@_compile_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the plan goes; default: standard output.")
@_debug_option
def compile(path: Path, options: Options, output: Path | None) -> None:
    """Compile to a plan (JSON)."""
    text = _compiled(path, options).to_json()
    if output is None:
        click.echo(text, nl=False)
    else:
        _write(output, text)
        click.echo(f"wrote {output}", err=True)


@cli.command()
@_SOURCE
@_compile_options
@click.option("--format", "format_", type=click.Choice(("text", "json")), default="text")
@_debug_option
def show(path: Path, options: Options, format_: str) -> None:
    """Say what runs where, in which order and why. FILE is a .rlflow file or a plan."""
    plan = _compiled(path, options)
    if format_ == "json":
        click.echo(plan.to_json(), nl=False)
        return
    from rlflow.backends.visualizers.summary import summarize

    _console().print(summarize(plan))


@cli.command()
@_SOURCE
@_compile_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File; its ending chooses svg, dot or mmd.")
@click.option(
    "--format", "format_", type=click.Choice(("svg", "dot", "mmd")), help="Default: by the file's ending, else mmd."
)
@_debug_option
def graph(path: Path, options: Options, output: Path | None, format_: str | None) -> None:
    """Draw the plan: stages in their pools, data, weights, and what the compiler inserted."""
    ending = output.suffix.lstrip(".") if output is not None else ""
    chosen = format_ or ending or "mmd"
    if chosen not in ("svg", "dot", "mmd"):
        raise click.UsageError(f"`{output}` ends in .{ending}; known are .svg, .dot and .mmd (or give --format)")
    plan = _compiled(path, options)
    from rlflow.backends.visualizers.graph import render_graph, render_svg

    if chosen == "svg":
        text, engine = render_svg(plan)
        if engine != "dot":
            click.echo("note: Graphviz' `dot` is not installed; drawn with the built-in layout", err=True)
    else:
        text = render_graph(plan, chosen)  # type: ignore[arg-type]
    if output is None:
        click.echo(text, nl=False)
    else:
        _write(output, text)
        click.echo(f"wrote {output}", err=True)


@cli.command()
@click.argument("path", metavar="[FILE]", type=click.Path(path_type=Path), required=False)
@_compile_options
@click.option("--steps", type=click.IntRange(min=0), help="Training steps; default: the flow's `stop after`.")
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), help="Of sampling and data order; default: the flow's `seed`."
)
@click.option("--run-dir", type=click.Path(path_type=Path), help="Default: runs/<flow>/<time>-<plan>.")
@click.option(
    "--resume", metavar="RUN_DIR", type=click.Path(path_type=Path), help="Go on from a run's newest checkpoint."
)
@click.option("--address", help="Ray cluster to use; default: RAY_ADDRESS, else a local one.")
@click.option("--allow-changed", is_flag=True, help="Run a plan although its sources changed.")
@click.option("--plain", is_flag=True, help="One line a step, even on a terminal.")
@_debug_option
def run(
    path: Path | None,
    options: Options,
    steps: int | None,
    seed: int | None,
    run_dir: Path | None,
    resume: Path | None,
    address: str | None,
    allow_changed: bool,
    plain: bool,
) -> None:
    """Run a .rlflow file or a plan on Ray. Ctrl-C stops after the step in progress, with a checkpoint."""
    from rlflow import runs

    try:
        request = _request(path, options, steps, seed, run_dir, resume, address, allow_changed)
    except runs.RunFolderError as error:
        raise click.UsageError(str(error)) from None
    from rich.console import Console

    from rlflow.backends.visualizers.progress import Progress

    gc.enable()  # a run lasts
    console = Console(stderr=True, highlight=False, force_terminal=False if plain else None)
    progress = Progress(steps, console)
    progress.start(f"run folder {request.run_dir}")
    try:
        end = runs.execute(request, progress)
    finally:
        progress.stop()
    if end.interrupted and end.step < end.total_steps:
        click.echo(
            f"stopped after step {end.step} of {end.total_steps}; checkpoint: {request.run_dir / end.checkpoint}",
            err=True,
        )
        click.echo(f"go on with: rlflow run --resume {request.run_dir}", err=True)
        raise SystemExit(130)
    _closing_lines(request, end.step, end.checkpoint)


def _request(
    path: Path | None,
    options: Options,
    steps: int | None,
    seed: int | None,
    run_dir: Path | None,
    resume: Path | None,
    address: str | None,
    allow_changed: bool,
) -> Any:
    from rlflow import driver, runs

    if resume is not None:
        if path is not None or run_dir is not None or seed is not None or options != driver.Options():
            raise click.UsageError("--resume takes everything from the run folder; only --steps may be given with it")
        runs.open_run_dir(resume, resume=True)
        plan = _compiled(resume / "plan.json", driver.Options())
        base_dir = driver.find_base_dir(plan, resume / "plan.json")
        runs.check_sources(plan, base_dir, allow_changed)
        return runs.RunRequest(plan, base_dir, resume, steps, None, resume=True, address=address)
    if path is None:
        raise click.UsageError("give a .rlflow file or a plan, or --resume RUN_DIR")
    plan = _compiled(path, options)
    if path.suffix == ".json":
        base_dir = driver.find_base_dir(plan, path)
        runs.check_sources(plan, base_dir, allow_changed)
    else:
        base_dir = Path(plan.sources[0].path).parent
    folder = run_dir if run_dir is not None else runs.default_run_dir(plan)
    runs.open_run_dir(folder, resume=False)
    return runs.RunRequest(plan, base_dir, folder, steps, seed, address=address)


def _closing_lines(request: Any, step: int, checkpoint: str) -> None:
    from rlflow.runs import read_metrics

    rows = read_metrics(request.run_dir / "metrics.jsonl")
    rewards = [r["data"]["critic/score/mean"] for r in rows if "critic/score/mean" in r["data"]]
    if rewards:
        tail = rewards[-10:]
        click.echo(
            f"mean reward: {rewards[0]:.3f} in the first step, {sum(tail) / len(tail):.3f} over the last {len(tail)}"
        )
    held: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row["data"].items():
            if name.startswith("val/"):
                held.setdefault(name, []).append(value)
    for name, values in sorted(held.items()):
        click.echo(f"{name}: {values[0]:.3f} before, {values[-1]:.3f} after")
    click.echo(f"{step} steps; run folder: {request.run_dir}")
    if checkpoint:
        click.echo(f"checkpoint: {request.run_dir / checkpoint}")


@cli.command()
@_SOURCE
@_compile_options
@click.option(
    "-p", "--passes", "spec", default="", help="Comma-separated passes; default: none, print the LOGICAL flow."
)
@_debug_option
def opt(path: Path, options: Options, spec: str) -> None:
    """Run single passes and print the intermediate form; for working on the compiler. FILE is .rlflow or .rlir."""
    from rlflow import driver
    from rlflow.ir.parser import FlowSyntaxError, parse_flow
    from rlflow.ir.printer import print_flow
    from rlflow.ir.verify import broken_rules
    from rlflow.passes.base import PassContext
    from rlflow.passes.pipeline import PASSES, load_pass, run_pipeline

    try:
        names = driver.pass_names(spec)
    except KeyError as error:
        raise click.UsageError(f"unknown pass {error}; known are {', '.join(PASSES)}") from None
    if path.suffix == ".rlir":
        if options.profile is not None:
            raise click.UsageError("--profile applies to a .rlflow file")
        try:
            flow = parse_flow(path.read_text("utf-8"))
        except (FlowSyntaxError, UnicodeDecodeError) as error:
            raise click.ClickException(f"{path}: {error}") from None
        broken = broken_rules(flow)
        if broken:
            raise click.ClickException(f"{path}: not a sound flow: {'; '.join(broken)}")
        context = PassContext()
    else:
        lowered = driver.lowered(path, options)
        flow, context = lowered.flow, driver.context_of(lowered, options)
    if names and flow.stage is not load_pass(names[0]).requires:
        needed = load_pass(names[0]).requires.name
        raise click.UsageError(f"pass {names[0]} needs a flow of stage {needed}, and this one is {flow.stage.name}")
    click.echo(print_flow(run_pipeline(flow, context, names)), nl=False)


def _write(path: Path, text: str) -> None:
    """Write through a temporary name, so that a failure leaves the old file. What is no file, such as a pipe or
    /dev/null, is written to and stays what it is."""
    if path.is_dir():
        raise click.UsageError(f"`{path}` is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        path.write_text(text, "utf-8")
        return
    building = path.with_name(path.name + ".partial")
    try:
        building.write_text(text, "utf-8")
        building.replace(path)
    except OSError:
        building.unlink(missing_ok=True)
        raise
