"""`--set path=value`: replace an argument in the tree before anything is checked.

A path starts with a flow parameter, a declared name, a value of the step (`samples.max_new`), a call of the step
(`actor.train.minibatch`), an evaluation's value (`heldout.answers.max_new`), or `seed`, `stop.steps`, `stop.epochs`,
`save.every`. What follows are argument names; nested calls go on with dots (`actor.train.optimizer.lr`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlflow.diagnostics import Label
from rlflow.frontend.command_line import Override
from rlflow.frontend.conditions import LeftOut, callee, plain_body
from rlflow.frontend.constants import Poison, Reporter
from rlflow.frontend.parameters import Signature
from rlflow.frontend.signatures import (
    ADAPTERS,
    DECLARATIONS,
    FUNCTIONS,
    LOSSES,
    METHODS,
    ON_ERRORS,
    OPTIMIZERS,
    REWARD_CALL,
)
from rlflow.frontend.units import COUNTS
from rlflow.grammar import nodes

_SETTINGS = {"seed": (), "stop": ("steps", "epochs"), "save": ("every",)}


def set_parameters(
    flow: nodes.Flow, overrides: Sequence[Override], report: Reporter
) -> tuple[nodes.Flow, list[Override]]:
    """The flow with its parameters set, on which its conditions depend, and the overrides that set something else."""
    params = {param.name.text: param for param in flow.params}
    rest: list[Override] = []
    for override in overrides:
        name = override.path[0]
        if name not in params or len(override.path) != 1:
            rest.append(override)
            continue
        try:
            params[name] = replace(params[name], default=_parameter(override, params, report))
        except Poison:
            continue
    chosen = tuple(params.get(param.name.text, param) for param in flow.params)
    return (replace(flow, params=chosen) if len(params) == len(flow.params) else flow), rest


def _parameter(override: Override, params: dict[str, nodes.Param], report: Reporter) -> nodes.Expr:
    """The value; a bare word is a text where the parameter's default is one, and a bare number counts what the default
    counts."""
    default = params[override.path[0]].default
    if isinstance(default, nodes.String) and override.raw.isidentifier() and override.raw not in (*params, "none"):
        return override.text()
    value = override.value(report, None)
    if isinstance(default, nodes.Quantity) and default.unit.rstrip("s") in {unit.rstrip("s") for unit in COUNTS}:
        return _with_unit(value, default.unit)
    return value


def apply_overrides(flow: nodes.Flow, overrides: Sequence[Override], left_out: LeftOut, report: Reporter) -> nodes.Flow:
    """The flow with every override applied in order; unknown paths are reported.

    The flow's conditions are decided; `left_out` is what they left out.
    """
    for override in overrides:
        try:
            flow = _apply(flow, override, left_out, report)
        except Poison:
            continue
    return flow


def _apply(flow: nodes.Flow, override: Override, left_out: LeftOut, report: Reporter) -> nodes.Flow:
    head = override.path[0]
    if head in _SETTINGS:
        return _setting(flow, override, report)
    items = list(flow.items)
    for i, item in enumerate(items):
        if isinstance(item, nodes.Declaration) and item.name.text == head and len(override.path) > 1:
            if _is_step_call(flow, override):
                break
            table = DECLARATIONS[item.kind]
            items[i] = replace(item, value=_in_call(item.value, 1, override, report, table))
            return replace(flow, items=tuple(items))
    for i, item in enumerate(items):
        if isinstance(item, nodes.Step):
            body = _in_block(plain_body(item.body), 0, override, report)
            if body is not None:
                items[i] = replace(item, body=body)
                return replace(flow, items=tuple(items))
        if isinstance(item, nodes.Evaluate) and item.name.text == head and len(override.path) > 1:
            if override.path[1] == "every" and len(override.path) == 2:
                items[i] = replace(item, every=override.value(report, None))
                return replace(flow, items=tuple(items))
            inner = plain_body(item.body)
            body = _in_block(inner, 1, override, report)
            if body is None:
                _refuse_left_out(override, 1, left_out, report)
                raise override.unknown(report, 1, ["every", *_block_names(inner)])
            items[i] = replace(item, body=body)
            return replace(flow, items=tuple(items))
    _refuse_left_out(override, 0, left_out, report)
    candidates = [p.name.text for p in flow.params] + list(_SETTINGS)
    for item in items:
        if isinstance(item, nodes.Declaration | nodes.Evaluate):
            candidates.append(item.name.text)
        elif isinstance(item, nodes.Step):
            candidates += _block_names(plain_body(item.body))
    if head in candidates:
        raise report.error(
            "RLF1011",
            f"`--set {head}=...` needs the argument to set, such as `{head}.NAME`",
            Label(override.key_span),
        )
    raise override.unknown(report, 0, candidates)


def _refuse_left_out(override: Override, at: int, left_out: LeftOut, report: Reporter) -> None:
    """Poison after reporting when the path leads into a branch that is not taken."""
    place = left_out.find(override.path[at:]) if len(override.path) > at + 1 else None
    if place is not None:
        raise report.error(
            "RLF1011",
            f"`--set {'.'.join(override.path)}` changes what stands in a branch that is not taken",
            Label(override.key_span),
            Label(place, "not taken", primary=False),
        )


def _is_step_call(flow: nodes.Flow, override: Override) -> bool:
    steps = [item for item in flow.items if isinstance(item, nodes.Step)]
    dotted = {".".join(callee(s.value)) for step in steps for s in step.body if isinstance(s, nodes.CallStatement)}
    return ".".join(override.path[:2]) in dotted and len(override.path) > 2


def _block_names(body: tuple[nodes.Statement, ...]) -> list[str]:
    return [s.name.text if isinstance(s, nodes.Assign) else ".".join(callee(s.value)) for s in body]


def _in_block(
    body: tuple[nodes.Statement, ...], at: int, override: Override, report: Reporter
) -> tuple[nodes.Statement, ...] | None:
    """The block with the argument replaced; None when no statement of it is meant."""
    rest = override.path[at:]
    for i, statement in enumerate(body):
        name = (statement.name.text,) if isinstance(statement, nodes.Assign) else callee(statement.value)
        if rest[: len(name)] != name or len(rest) == len(name):
            continue
        value = _in_call(statement.value, at + len(name), override, report, None)
        return (*body[:i], replace(statement, value=value), *body[i + 1 :])
    return None


def _signature(call: nodes.Call, table: dict[str, Signature] | None) -> Signature | None:
    function = call.function
    if isinstance(function, nodes.Attribute):
        for methods in METHODS.values():
            if function.name.text in methods:
                return methods[function.name.text]
        return None
    if not isinstance(function, nodes.Name):
        return None
    for candidates in (table, FUNCTIONS, OPTIMIZERS, LOSSES, ON_ERRORS, ADAPTERS):
        if candidates and function.id in candidates:
            return candidates[function.id]
    return REWARD_CALL


def _in_call(
    expr: nodes.Expr, at: int, override: Override, report: Reporter, table: dict[str, Signature] | None
) -> nodes.Expr:
    signature = _signature(expr, table) if isinstance(expr, nodes.Call) else None
    if not isinstance(expr, nodes.Call) or signature is None:
        raise override.unknown(report, at, [])
    word = override.path[at]
    parameter = signature.parameter(word)
    if parameter is None and not signature.extra:
        raise override.unknown(report, at, sorted(signature.names))
    index = _argument_index(expr, signature, word)
    arguments = list(expr.arguments)
    if at + 1 < len(override.path):
        if index is None:
            whole = ".".join(override.path[: at + 1])
            raise report.error(
                "RLF1011",
                f"`--set`: `{whole}` is not written in the file, so nothing in it can be set",
                Label(override.key_span),
                help=(f"set it whole: `{whole}=VALUE`",),
            )
        found = arguments[index]
        arguments[index] = replace(found, value=_in_call(found.value, at + 1, override, report, None))
        return replace(expr, arguments=tuple(arguments))
    value = override.value(report, parameter)
    if index is not None:
        arguments[index] = replace(arguments[index], value=value)
    else:
        arguments.append(nodes.Argument(nodes.Ident(word, override.key_span), value, value.span))
    return replace(expr, arguments=tuple(arguments))


def _argument_index(call: nodes.Call, signature: Signature, word: str) -> int | None:
    """Where the parameter is given in the call, by name or by position."""
    position = 0
    for i, argument in enumerate(call.arguments):
        if argument.name is not None:
            if argument.name.text == word:
                return i
            continue
        if position < len(signature.parameters) and signature.parameters[position].name == word:
            return i
        position += 1
    return None


def _setting(flow: nodes.Flow, override: Override, report: Reporter) -> nodes.Flow:
    head = override.path[0]
    keys = _SETTINGS[head]
    if (not keys and len(override.path) > 1) or (keys and (len(override.path) != 2 or override.path[1] not in keys)):
        if len(override.path) > 1:
            raise override.unknown(report, 1, list(keys))
        raise report.error("RLF1011", f"`--set {head}=...` needs a key: `{head}.{keys[0]}`", Label(override.key_span))
    value = override.value(report, None)
    item: nodes.FlowItem
    if head == "seed":
        item = nodes.Seed(value, override.key_span)
    elif head == "save":
        item = nodes.Save(_with_unit(value, "steps"), override.key_span)
    else:
        item = nodes.Stop(_with_unit(value, override.path[1]), override.key_span)
    kept = tuple(i for i in flow.items if not isinstance(i, type(item)))
    return replace(flow, items=(*kept, item))


def _with_unit(value: nodes.Expr, unit: str) -> nodes.Expr:
    return nodes.Quantity(value.value, unit, value.span) if isinstance(value, nodes.Number) else value
