"""One `flow` block to a LOGICAL flow."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TypeVar

from rlflow.diagnostics import Label, Severity, Span
from rlflow.frontend.bind import Scope, convert
from rlflow.frontend.conditions import plain_body
from rlflow.frontend.constants import Poison, Qty, Reporter, Value, describe, evaluate
from rlflow.frontend.declarations import Declarations
from rlflow.frontend.derived_models import check_trained
from rlflow.frontend.parameters import Count, Whole
from rlflow.frontend.schedules import permitted_staleness
from rlflow.frontend.steps import Block
from rlflow.grammar import nodes
from rlflow.ir.flow import STEP, Evaluation, Flow, Model, Node, Reward, Stage
from rlflow.ir.ops import Train

Item = TypeVar("Item", nodes.Step, nodes.Stop, nodes.Save, nodes.Seed)


def scope_of(flow: nodes.Flow, report: Reporter) -> Scope:
    """The values of the flow's parameters. Raises Poison after reporting one that has none."""
    constants: dict[str, Value] = {}
    first: dict[str, nodes.Ident] = {}
    for param in flow.params:
        name = param.name.text
        if name in first:
            report.error(
                "RLF1002",
                f"parameter `{name}` is declared twice",
                Label(param.name.span, "again here"),
                Label(first[name].span, "first here", primary=False),
            )
            continue
        first[name] = param.name
        if param.default is None:
            raise report.error(
                "RLF1004",
                f"parameter `{name}` of flow `{flow.name.text}` has no value",
                Label(param.span),
                help=(f"give it one with `--set {name}=VALUE`, or a default",),
            )
        constants[name] = evaluate(param.default, constants, report)
    return Scope(constants)


def lower_flow(tree: nodes.Flow, scope: Scope, report: Reporter, base_dir: Path | None) -> tuple[Declarations, Flow]:
    """The LOGICAL flow of a flow block whose conditions are decided. Problems are reported; some raise Poison."""
    declared = Declarations(scope, report, base_dir)
    declarations = [item for item in tree.items if isinstance(item, nodes.Declaration)]
    declared.announced = {d.name.text: d for d in declarations}
    # References may point forward: a frozen copy needs its model, a scorer its data.
    order = {"data": 0, "model": 1, "reward": 2, "environment": 3}
    for declaration in sorted(declarations, key=lambda d: (order[d.kind], _depth(d, declarations))):
        declared.add(declaration)
    step = _single(tree, nodes.Step, "step", report)
    if step is None:
        raise report.error("RLF1004", f"flow `{tree.name.text}` has no `step` block", Label(tree.name.span))
    block = Block(declared, scope, report, STEP)
    block.lower(plain_body(step.body))
    all_nodes, all_edges = dict(block.nodes), list(block.edges)
    evaluations: dict[str, Evaluation] = {}
    for item in tree.items:
        if not isinstance(item, nodes.Evaluate):
            continue
        name = item.name.text
        if name in evaluations:
            report.error(
                "RLF1002",
                f"evaluation `{name}` is defined twice",
                Label(_head(item.span), "again here"),
                Label(_head(evaluations[name].span or item.span), "first here", primary=False),
            )
            continue
        if name in block.names or declared.kind_of(name) is not None or name in scope.constants:
            report.error("RLF1002", f"`{name}` names something else already", Label(item.name.span))
            continue
        try:
            every = 0 if item.every is None else _steps("every", item.every, scope, report)
        except Poison:
            every = 0
        evaluations[name] = Evaluation(name, every, item.span)
        inner = Block(declared, scope, report, name)
        inner.lower(plain_body(item.body))
        all_nodes |= inner.nodes
        all_edges += inner.edges
    _forgive_unused(declared, tree, report)
    trained = {n.op.model for n in block.nodes.values() if isinstance(n.op, Train)}
    if not trained and not report.has_errors:
        report.error("RLF1015", "this step trains nothing", Label(_head(step.span)))
    _warn_unused(declared, all_nodes, report)
    if not report.has_errors:
        spans = {name: declared.declared_at(name) for name in declared.models}
        check_trained(declared.models, trained, spans, report)
    stop_steps, stop_epochs = _stop(tree, scope, report)
    save = _single(tree, nodes.Save, "save", report)
    save_every = 0
    if save is not None:
        try:
            save_every = _steps("every", save.every, scope, report)
        except Poison:
            pass
    allows: dict[str, nodes.Allow] = {}
    for allow in tree.items:
        if isinstance(allow, nodes.Allow):
            if allow.model.text in allows:
                report.error("RLF1002", f"staleness of `{allow.model.text}` is allowed twice", Label(allow.span))
            allows[allow.model.text] = allow
    permitted, corrections = permitted_staleness(allows, declared.names("model"), scope, report)
    flow = Flow(
        name=tree.name.text,
        stage=Stage.LOGICAL,
        data={d.name.text: declared.data[d.name.text] for d in declarations if d.name.text in declared.data},
        models={
            d.name.text: replace(declared.models[d.name.text], trainable=d.name.text in trained)
            for d in declarations
            if d.name.text in declared.models
        },
        rewards={d.name.text: declared.rewards[d.name.text] for d in declarations if d.name.text in declared.rewards},
        environments={
            d.name.text: declared.environments[d.name.text]
            for d in declarations
            if d.name.text in declared.environments
        },
        nodes=all_nodes,
        edges=tuple(all_edges),
        evaluations=tuple(evaluations.values()),
        allowed_staleness=permitted,
        corrections=corrections,
        stop_steps=stop_steps,
        stop_epochs=stop_epochs,
        save_every=save_every,
        save_span=None if save is None else save.span,
        seed=_seed(tree, scope, report),
        span=tree.span,
    )
    return declared, flow


def _depth(declaration: nodes.Declaration, all_of_them: list[nodes.Declaration]) -> int:
    """How many models this one is derived from, one after the other; a cycle ends the count."""
    models = {d.name.text: d.value for d in all_of_them if d.kind == "model"}
    depth, value = 0, declaration.value
    while depth <= len(models) and isinstance(value, nodes.Call) and isinstance(value.function, nodes.Name):
        of = value.arguments[0].value if value.arguments else None
        if value.function.id not in ("frozen", "value") or not isinstance(of, nodes.Name) or of.id not in models:
            break
        depth, value = depth + 1, models[of.id]
    return depth


def _head(span: Span) -> Span:
    """Only the first line of a block, so that the excerpt stays short."""
    end = span.file.text.find("\n", span.start, span.end)
    return span if end < 0 else Span(span.file, span.start, end)


def _single(tree: nodes.Flow, kind: type[Item], word: str, report: Reporter) -> Item | None:
    found = [item for item in tree.items if isinstance(item, kind)]
    for extra in found[1:]:
        report.error(
            "RLF1002",
            f"flow `{tree.name.text}` has two `{word}` parts",
            Label(_head(extra.span), "again here"),
            Label(_head(found[0].span), "first here", primary=False),
        )
    return found[0] if found else None


def _steps(name: str, expr: nodes.Expr, scope: Scope, report: Reporter) -> int:
    value = evaluate(expr, scope.constants, report)
    steps: int = convert(name, Count("steps"), value, expr.span, scope, report)
    return steps


def _stop(tree: nodes.Flow, scope: Scope, report: Reporter) -> tuple[int | None, int | None]:
    """(steps, epochs); one pass over the data when nothing is said."""
    stop = _single(tree, nodes.Stop, "stop", report)
    if stop is None:
        return None, 1
    try:
        value = evaluate(stop.after, scope.constants, report)
        if isinstance(value, Qty) and value.dimension in ("steps", "epochs"):
            number: int = convert("stop", Count(value.dimension), value, stop.after.span, scope, report)
            return (number, None) if value.dimension == "steps" else (None, number)
        report.error(
            "RLF1005",
            "a run stops after a number of steps or epochs",
            Label(stop.after.span, f"this is {describe(value)}"),
            help=("for example `stop after 300 steps`",),
        )
    except Poison:
        pass
    return None, 1


def _seed(tree: nodes.Flow, scope: Scope, report: Reporter) -> int:
    seed = _single(tree, nodes.Seed, "seed", report)
    if seed is None:
        return 0
    try:
        value = evaluate(seed.value, scope.constants, report)
        number: int = convert("seed", Whole(0, 2**63 - 1), value, seed.value.span, scope, report)
        return number
    except Poison:
        return 0


def _forgive_unused(declared: Declarations, tree: nodes.Flow, report: Reporter) -> None:
    """What is wrong with a declaration that nothing mentions is no reason to stop: its errors become warnings."""
    if not declared.poisoned:
        return
    mentioned: set[str] = set()
    stack: list[object] = [item for item in tree.items if not isinstance(item, nodes.Declaration)]
    stack += [item.value for item in tree.items if isinstance(item, nodes.Declaration)]
    while stack:
        node = stack.pop()
        if isinstance(node, nodes.Name):
            mentioned.add(node.id)
        elif isinstance(node, tuple):
            stack.extend(node)
        elif is_dataclass(node) and not isinstance(node, Span):
            stack.extend(getattr(node, field.name) for field in fields(node))
    for name in declared.poisoned:
        if name in mentioned:
            continue
        for problem in declared.problems.get(name, ()):
            index = next(i for i, d in enumerate(report.diagnostics) if d is problem)
            note = f"`{name}` is not used, so the flow is compiled without it"
            report.diagnostics[index] = replace(problem, severity=Severity.WARNING, notes=(*problem.notes, note))


def _warn_unused(declared: Declarations, all_nodes: dict[str, Node], report: Reporter) -> None:
    if report.has_errors:
        return
    used: set[str] = set()
    for node in all_nodes.values():
        op = node.op
        used |= {getattr(op, key) for key in ("data", "model", "reward", "environment") if getattr(op, key, None)}
    sources: list[Model | Reward] = [*declared.models.values(), *declared.rewards.values()]
    for source in sources:
        if source.name in used:
            used |= {getattr(source.source, key) for key in ("of", "data") if getattr(source.source, key, None)}
    for name in declared.names():
        if name not in used and name not in declared.poisoned:
            ident = declared.declared_at(name)
            report.warning("RLF1013", f"{declared.kind_of(name)} `{name}` is never used", Label(ident.span))
