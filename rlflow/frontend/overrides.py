"""`--set path=value`: replace an argument in the tree before anything is checked.

A path starts with a flow parameter, a declared name, a value of the step (`samples.max_new`), a call of the step
(`actor.train.minibatch`), an evaluation's value (`heldout.answers.max_new`), or `seed`, `stop.steps`, `stop.epochs`,
`save.every`. What follows are argument names; nested calls go on with dots (`actor.train.optimizer.lr`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlflow.diagnostics import CompileError, Diagnostic, Label, SourceFile, Span, did_you_mean
from rlflow.frontend.constants import Poison, Reporter
from rlflow.frontend.parameters import Parameter, Signature, Text
from rlflow.frontend.signatures import (
    DECLARATIONS,
    FUNCTIONS,
    LOSSES,
    METHODS,
    ON_ERRORS,
    OPTIMIZERS,
    REWARD_CALL,
)
from rlflow.grammar import nodes
from rlflow.grammar.parse import parse_expression

_SETTINGS = {"seed": (), "stop": ("steps", "epochs"), "save": ("every",)}


def apply_overrides(flow: nodes.Flow, overrides: Sequence[str], report: Reporter) -> nodes.Flow:
    """The flow with every override applied in order; unknown paths are reported."""
    for text in overrides:
        try:
            flow = _apply(flow, _Override.read(text, report), report)
        except Poison:
            continue
    return flow


@dataclass(frozen=True)
class _Override:
    file: SourceFile
    path: tuple[str, ...]
    raw: str

    @classmethod
    def read(cls, text: str, report: Reporter) -> _Override:
        key, equals, value = text.partition("=")
        file = SourceFile("--set " + text, text)
        if not equals or not key.strip() or not value.strip():
            raise report.error(
                "RLF1011",
                f"`--set {text}` is not `path=value`",
                Label(Span(file, 0, len(text))),
                help=("for example `--set batch.count=8`",),
            )
        return cls(file, tuple(key.strip().split(".")), value.strip())

    @property
    def key_span(self) -> Span:
        return Span(self.file, 0, self.file.text.index("="))

    def value(self, report: Reporter, parameter: Parameter | None) -> nodes.Expr:
        """The value as an expression; a bare word or path is a text where a text is expected."""
        start = len(self.file.text) - len(self.file.text.partition("=")[2].lstrip())
        span = Span(self.file, start, len(self.file.text))
        if parameter is not None and isinstance(parameter.accepts, Text) and not self.raw.startswith('"'):
            return nodes.Constant(None, span) if self.raw == "none" else nodes.String(self.raw, span)
        padded = SourceFile(self.file.name, " " * start + self.raw)
        try:
            return _at(parse_expression(padded), span)
        except CompileError as error:
            report.diagnostics.extend(
                Diagnostic(d.code, d.message, tuple(Label(span, x.text) for x in d.labels), d.notes, d.help)
                for d in error.diagnostics
            )
            raise Poison() from None

    def unknown(self, report: Reporter, at: int, candidates: list[str]) -> Poison:
        word = self.path[at]
        guess = did_you_mean(word, candidates)
        help_lines = (f"did you mean `{'.'.join((*self.path[:at], guess, *self.path[at + 1 :]))}`?",) if guess else ()
        notes = () if guess or not candidates else ("known here: " + ", ".join(f"`{c}`" for c in sorted(candidates)),)
        where = f" in `{'.'.join(self.path[:at])}`" if at else ""
        return report.error(
            "RLF1011", f"`--set`: there is no `{word}`{where}", Label(self.key_span), notes=notes, help=help_lines
        )


def _at(expr: nodes.Expr, span: Span) -> nodes.Expr:
    """Only the outermost span matters: it says that the value came from the command line."""
    return replace(expr, span=span)


def _apply(flow: nodes.Flow, override: _Override, report: Reporter) -> nodes.Flow:
    head = override.path[0]
    for i, param in enumerate(flow.params):
        if param.name.text == head and len(override.path) == 1:
            params = list(flow.params)
            params[i] = replace(param, default=override.value(report, None))
            return replace(flow, params=tuple(params))
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
            body = _in_block(item.body, 0, override, report)
            if body is not None:
                items[i] = replace(item, body=body)
                return replace(flow, items=tuple(items))
        if isinstance(item, nodes.Evaluate) and item.name.text == head and len(override.path) > 1:
            if override.path[1] == "every" and len(override.path) == 2:
                items[i] = replace(item, every=override.value(report, None))
                return replace(flow, items=tuple(items))
            body = _in_block(item.body, 1, override, report)
            if body is None:
                raise override.unknown(report, 1, ["every", *_block_names(item.body)])
            items[i] = replace(item, body=body)
            return replace(flow, items=tuple(items))
    candidates = [p.name.text for p in flow.params] + list(_SETTINGS)
    for item in items:
        if isinstance(item, nodes.Declaration | nodes.Evaluate):
            candidates.append(item.name.text)
        elif isinstance(item, nodes.Step):
            candidates += _block_names(item.body)
    if head in candidates:
        raise report.error(
            "RLF1011",
            f"`--set {head}=...` needs the argument to set, such as `{head}.NAME`",
            Label(override.key_span),
        )
    raise override.unknown(report, 0, candidates)


def _is_step_call(flow: nodes.Flow, override: _Override) -> bool:
    steps = [item for item in flow.items if isinstance(item, nodes.Step)]
    dotted = {".".join(_callee(s.value)) for step in steps for s in step.body if isinstance(s, nodes.CallStatement)}
    return ".".join(override.path[:2]) in dotted and len(override.path) > 2


def _callee(expr: nodes.Expr) -> tuple[str, ...]:
    if isinstance(expr, nodes.Call):
        return _callee(expr.function)
    if isinstance(expr, nodes.Attribute):
        return (*_callee(expr.base), expr.name.text)
    return (expr.id,) if isinstance(expr, nodes.Name) else ()


def _block_names(body: tuple[nodes.Statement, ...]) -> list[str]:
    return [s.name.text if isinstance(s, nodes.Assign) else ".".join(_callee(s.value)) for s in body]


def _in_block(
    body: tuple[nodes.Statement, ...], at: int, override: _Override, report: Reporter
) -> tuple[nodes.Statement, ...] | None:
    """The block with the argument replaced; None when no statement of it is meant."""
    rest = override.path[at:]
    for i, statement in enumerate(body):
        name = (statement.name.text,) if isinstance(statement, nodes.Assign) else _callee(statement.value)
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
    for candidates in (table, FUNCTIONS, OPTIMIZERS, LOSSES, ON_ERRORS):
        if candidates and function.id in candidates:
            return candidates[function.id]
    return REWARD_CALL


def _in_call(
    expr: nodes.Expr, at: int, override: _Override, report: Reporter, table: dict[str, Signature] | None
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


def _setting(flow: nodes.Flow, override: _Override, report: Reporter) -> nodes.Flow:
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
