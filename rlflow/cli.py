"""The command line: verbs to driver. The only place that prints and exits.

Exit codes: 0 ok · 1 problems found, plan refused or run failed · 2 usage or files · 70 internal error · 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlflow import __version__
from rlflow.commands.diff import diff
from rlflow.commands.doctor import doctor
from rlflow.commands.emit import emit
from rlflow.commands.explain import explain
from rlflow.commands.fmt import fmt
from rlflow.commands.graph import graph
from rlflow.commands.init import init
from rlflow.commands.options import compile_options, debug_option, plan_of_file, write_file
from rlflow.commands.profile import profile
from rlflow.commands.report import report
from rlflow.commands.simulate import simulate
from rlflow.commands.trace import trace
from rlflow.commands.virtual import virtual_options
from rlflow.commands.watch import watch
from rlflow.diagnostics import CompileError, Diagnostic, Label, RunFailure, SourceFile, Span
from rlflow.diagnostics.render import FORMATS, MACHINE_FORMATS, render, summary_line

if TYPE_CHECKING:
    from rich.console import Console

    from rlflow.backends.ray_runtime.virtual.settings import VirtualSettings
    from rlflow.driver import Options
    from rlflow.plan import Plan

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


def _compiled(path: Path, options: Options) -> Plan:
    """The plan of a file, kept so that a failure can show where its stage was written."""
    plan = plan_of_file(path, options)
    _state["plan"] = plan
    return plan


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rlflow")
def cli() -> None:
    """Write, compile, see and run reinforcement-learning workflows for language models."""
    _state.clear()


for verb in (diff, doctor, emit, explain, fmt, graph, init, profile, report, simulate, trace, watch):
    cli.add_command(verb)


# --- verbs -----------------------------------------------------------------------------------------------------------


@cli.command()
@_SOURCE
@compile_options
@click.option("--format", "format_", type=click.Choice(FORMATS), default="full", help="How problems are written.")
@debug_option
def check(path: Path, options: Options, format_: str) -> None:
    """Find every mistake that can be found without running anything."""
    from rlflow import driver

    _state["format"], _state["path"] = format_, path.as_posix()
    checked = driver.check(path, options)
    _print_diagnostics(checked.warnings, format_)
    if format_ == "full":
        click.echo(checked.sentence())


@cli.command()
@_SOURCE
@compile_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the plan goes; default: standard output.")
@debug_option
def compile(path: Path, options: Options, output: Path | None) -> None:
    """Compile to a plan (JSON)."""
    text = _compiled(path, options).to_json()
    if output is None:
        click.echo(text, nl=False)
    else:
        write_file(output, text)
        click.echo(f"wrote {output}", err=True)


@cli.command()
@_SOURCE
@compile_options
@click.option("--format", "format_", type=click.Choice(("text", "json")), default="text")
@click.option("--full", is_flag=True, help="Everything, instead of what fits on one screen.")
@debug_option
def show(path: Path, options: Options, format_: str, full: bool) -> None:
    """Say what runs where, in which order and why. FILE is a .rlflow file or a plan."""
    plan = _compiled(path, options)
    if format_ == "json":
        click.echo(plan.to_json(), nl=False)
        return
    from rlflow.backends.visualizers.summary import summarize, summary_text

    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        _console().print(summarize(plan, full))
    else:
        click.echo(summary_text(plan, full=full), nl=False)


@cli.command()
@click.argument("path", metavar="[FILE]", type=click.Path(path_type=Path), required=False)
@compile_options
@click.option("--steps", type=click.IntRange(min=0), help="Training steps; default: the flow's `stop after`.")
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), help="Of sampling and data order; default: the flow's `seed`."
)
@click.option("--run-dir", type=click.Path(path_type=Path), help="Default: runs/<flow>/<time>-<plan>.")
@click.option(
    "--resume", metavar="RUN_DIR", type=click.Path(path_type=Path), help="Go on from a run's newest checkpoint."
)
@click.option(
    "--keep-checkpoints",
    metavar="N",
    type=click.IntRange(min=0),
    help="Remove all but the newest N checkpoints; 0 keeps all. Default: as before, all in a new run.",
)
@click.option("--address", help="Ray cluster to use; default: RAY_ADDRESS, else a local one.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "npu", "virtual"]),
    help="This machine's devices of that kind; default: cpu. virtual: none, stages sleep for their estimated time.",
)
@virtual_options
@click.option("--allow-changed", is_flag=True, help="Run a plan although its sources changed.")
@click.option(
    "--restarts", type=click.IntRange(min=0), help="How often to go on by itself after a process died; default: 3."
)
@click.option("--plain", is_flag=True, help="One line a step, even on a terminal.")
@click.option(
    "--log",
    multiple=True,
    metavar="NAMES",
    help="Where metrics go too: tensorboard, prometheus, wandb, swanlab, mlflow; several with commas between.",
)
@debug_option
def run(
    path: Path | None,
    options: Options,
    steps: int | None,
    seed: int | None,
    run_dir: Path | None,
    resume: Path | None,
    keep_checkpoints: int | None,
    address: str | None,
    device: str | None,
    virtual: VirtualSettings | None,
    allow_changed: bool,
    restarts: int | None,
    plain: bool,
    log: tuple[str, ...],
) -> None:
    """Run a .rlflow file or a plan on Ray. Ctrl-C stops after the step in progress, with a checkpoint."""

    from rlflow import runs
    from rlflow.sinks.names import sink_names

    targets = sink_names(log)
    try:
        request = _request(path, options, steps, seed, run_dir, resume, address, allow_changed, device, virtual)
        request = replace(request, keep=keep_checkpoints, log=targets)
    except runs.RunFolderError as error:
        raise click.UsageError(str(error)) from None
    request = replace(request, restarts=restarts)
    from rich.console import Console

    from rlflow.backends.visualizers.progress import Progress

    gc.enable()  # a run lasts
    console = Console(stderr=True, highlight=False, force_terminal=False if plain else None)
    progress = Progress(steps, console)
    progress.capacities = {queue.id: queue.capacity for queue in request.plan.queues}
    progress.start(f"run folder {request.run_dir}")
    try:
        end = runs.execute(request, progress)
    finally:
        progress.stop()
    if end.interrupted and end.step < end.total_steps and request.virtual is not None:
        click.echo(f"stopped after step {end.step} of {end.total_steps}; a virtual run is not resumed", err=True)
        raise SystemExit(130)
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
    device: str | None,
    virtual: VirtualSettings | None,
) -> Any:
    from rlflow import driver, runs

    if resume is not None:
        if path is not None or run_dir is not None or seed is not None or device or options != driver.Options():
            raise click.UsageError(
                "--resume takes everything from the run folder; only --steps, --log and --keep-checkpoints go with it"
            )
        request = runs.resume_request(resume, allow_changed=allow_changed)
        _state["plan"] = request.plan
        return replace(request, steps=steps, address=address)
    if path is None:
        raise click.UsageError("give a .rlflow file or a plan, or --resume RUN_DIR")
    plan = _compiled(path, options)
    if path.suffix == ".json":
        base_dir = driver.find_base_dir(plan, path)
        runs.check_sources(plan, base_dir, allow_changed)
    else:
        base_dir = Path(plan.sources[0].path).parent
    seen = None
    if virtual is not None:
        from rlflow.backends.ray_runtime.virtual.preview import preview_of

        seen = preview_of(plan, virtual)
        _print_diagnostics(seen.warnings, "full")
        click.echo(seen.sentence, err=True)
    elif device is not None:
        plan = runs.on_device(plan, device)
    folder = run_dir if run_dir is not None else runs.default_run_dir(plan)
    runs.open_run_dir(folder, resume=False)
    return runs.RunRequest(plan, base_dir, folder, steps, seed, address=address, virtual=seen)


def _closing_lines(request: Any, step: int, checkpoint: str) -> None:
    from collections import deque

    from rlflow.run_rows import json_lines

    first: float | None = None
    tail: deque[float] = deque(maxlen=10)
    held: dict[str, tuple[float, float]] = {}
    for row in json_lines(request.run_dir / "metrics.jsonl"):
        data = row["data"]
        if "critic/score/mean" in data:
            tail.append(data["critic/score/mean"])
            first = tail[0] if first is None else first
        for name, value in data.items():
            if name.startswith("val/"):
                held[name] = (held.get(name, (value, value))[0], value)
    if first is not None:
        click.echo(f"mean reward: {first:.3f} in the first step, {sum(tail) / len(tail):.3f} over the last {len(tail)}")
    for name, (before, after) in sorted(held.items()):
        click.echo(f"{name}: {before:.3f} before, {after:.3f} after")
    click.echo(f"{step} steps; run folder: {request.run_dir}")
    if checkpoint:
        click.echo(f"checkpoint: {request.run_dir / checkpoint}")


@cli.command()
@_SOURCE
@compile_options
@click.option(
    "-p", "--passes", "spec", default="", help="Comma-separated passes; default: none, print the LOGICAL flow."
)
@debug_option
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
