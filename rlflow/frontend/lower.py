"""A parsed program to a LOGICAL flow with its schedule and cluster. Every name and unit is checked on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path

from rlflow.cluster.presets.architecture import Architecture
from rlflow.cluster.shape import ModelShape
from rlflow.cluster.spec import Cluster, Schedule
from rlflow.diagnostics import CompileError, Diagnostic, Label, Span
from rlflow.frontend.command_line import read_overrides
from rlflow.frontend.conditions import LeftOut, select
from rlflow.frontend.constants import Poison, Reporter
from rlflow.frontend.flows import lower_flow, scope_of
from rlflow.frontend.hints import with_hints
from rlflow.frontend.imports import File, Linked, link
from rlflow.frontend.overrides import apply_overrides, set_parameters
from rlflow.frontend.schedules import choose
from rlflow.grammar import nodes
from rlflow.ir.flow import Flow
from rlflow.values import dataclass


@dataclass(frozen=True)
class Lowered:
    """What the passes start from, and the warnings so far."""

    flow: Flow
    schedule: Schedule
    cluster: Cluster
    warnings: tuple[Diagnostic, ...]
    reward_files: tuple[Path, ...]
    """Python files beside the source, whose change changes the run."""
    files: tuple[File, ...] = ()
    """The text that was lowered and all that it imports; the file of the flow first, then the file that was asked for.
    """
    shapes: Mapping[str, ModelShape] = field(default_factory=dict)
    """Model to what sharding must divide, where known."""
    architectures: Mapping[str, Architecture] = field(default_factory=dict)
    """Model to its architecture, where it follows from the sources without loading weights."""


def lower(
    program: nodes.Program,
    base_dir: Path | None,
    *,
    flow_name: str | None = None,
    cluster_name: str | None = None,
    overrides: Sequence[str] = (),
) -> Lowered:
    """Check and lower one flow of the program.

    `base_dir` is the folder of the program's file; None skips the checks that look at files. Data and rewards are
    looked for beside the file of the flow that uses them. Raises CompileError with every problem found.
    """
    report = Reporter()
    left_out = LeftOut()
    try:
        linked = link(program, base_dir, report)
        tree = _pick(linked, flow_name, report)
        tree, rest = set_parameters(tree, read_overrides(overrides, report), report)
        scope = scope_of(tree, report)
        tree = select(tree, scope.constants, left_out, report)
        if rest:  # a value that is set may be a condition of its own
            tree = select(apply_overrides(tree, rest, left_out, report), scope.constants, left_out, report)
        home = linked.path_of(tree.span)
        declared, flow = lower_flow(tree, scope, report, None if home is None else home.parent)
        if report.has_errors:
            raise Poison()
        schedule, cluster = choose(linked.program, tree, scope, report, flow, cluster_name)
        if report.has_errors:
            raise Poison()
    except Poison:
        raise CompileError(with_hints(program, left_out.explain(report.diagnostics))) from None
    warnings = tuple(left_out.explain(report.diagnostics))
    files = sorted(linked.files, key=lambda file: (file.source is not tree.span.file, file.source is not program.file))
    shapes = {name: shape for name in flow.models if (shape := declared.shape_of(name)) is not None}
    known = {name: found for name in flow.models if (found := declared.architecture_of(name)) is not None}
    return Lowered(flow, schedule, cluster, warnings, tuple(declared.reward_files), tuple(files), shapes, known)


def _pick(linked: Linked, name: str | None, report: Reporter) -> nodes.Flow:
    """The flow that is meant: without a name the only one of the file, or else of what it imports."""
    program = linked.program
    flows = program.flows
    seen: dict[str, nodes.Flow] = {}
    for flow in flows:
        if flow.name.text in seen:
            report.error(
                "RLF1002",
                f"flow `{flow.name.text}` is defined twice",
                Label(flow.name.span, "again here"),
                Label(seen[flow.name.text].name.span, "first here", primary=False),
            )
        seen.setdefault(flow.name.text, flow)
    if not flows:
        raise report.error(
            "RLF1004",
            "this file has no `flow`",
            Label(Span(program.file, 0, 0)),
            help=("start with `flow name { ... }`",),
        )
    if name is not None:
        if name not in seen:
            raise report.unknown("flow", name, Label(flows[0].name.span), list(seen))
        return seen[name]
    own = [flow for flow in flows if flow.span.file is program.file]
    if len(own or flows) > 1:
        flows = tuple(own) or flows
        raise report.error(
            "RLF1004",
            f"this file has {len(flows)} flows",
            *(Label(f.name.span, "", primary=i == 0) for i, f in enumerate(flows)),
            help=("choose one with `--flow NAME`",),
        )
    return (own or flows)[0]
