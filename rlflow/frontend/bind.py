"""Arguments of a call to the parameters of its signature, each checked against what the parameter accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlflow.diagnostics import Label, Span, did_you_mean, one_of
from rlflow.frontend.constants import Poison, Qty, Reporter, Value, describe, evaluate
from rlflow.frontend.parameters import (
    MOST,
    REQUIRED,
    Accepts,
    Count,
    Duration,
    Flag,
    Parameter,
    Real,
    Signature,
    Text,
    Whole,
    Word,
)
from rlflow.frontend.units import COUNTS, EXAMPLES
from rlflow.grammar import nodes
from rlflow.values import dataclass

Special = Callable[[Parameter, nodes.Expr], Any]
"""Resolves parameters that take no constant (rows, columns, losses, references)."""


@dataclass
class Bound:
    """Values by parameter name, and where each was written (no entry = default)."""

    values: dict[str, Any]
    spans: dict[str, Span]
    extra: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass(frozen=True)
class Scope:
    """What constants may refer to; `lenient_spans` holds files whose plain numbers may stand for counts (overrides)."""

    constants: Mapping[str, Value]
    override_prefix: str = "--set "

    def is_override(self, span: Span) -> bool:
        return span.file.name.startswith(self.override_prefix)


def bind(call: nodes.Call, signature: Signature, scope: Scope, report: Reporter, special: Special) -> Bound:
    """All arguments checked; every problem of the call is reported before Poison is raised."""
    chosen: dict[str, nodes.Argument] = {}
    extra: dict[str, nodes.Argument] = {}
    meant: set[str] = set()
    failed = False
    positions = iter(signature.parameters)
    for argument in call.arguments:
        if argument.name is None:
            parameter = next(positions, None)
            if parameter is None or parameter.name in chosen:
                taken = len(signature.parameters)
                report.error(
                    "RLF1003",
                    f"`{signature.name}` takes {taken} argument{'s' if taken != 1 else ''} at most",
                    Label(argument.span, "one too many"),
                )
                failed = True
                continue
            chosen[parameter.name] = argument
            continue
        name = argument.name.text
        if name not in signature.names:
            if signature.extra:
                extra[name] = argument
                continue
            meant.add(did_you_mean(name, signature.names) or "")
            report.unknown(
                f"argument of `{signature.name}`:",
                name,
                Label(argument.name.span),
                sorted(signature.names),
                code="RLF1003",
            )
            failed = True
        elif name in chosen:
            report.error(
                "RLF1002",
                f"`{name}` is given twice",
                Label(argument.span),
                Label(chosen[name].span, "first here", primary=False),
            )
            failed = True
        else:
            chosen[name] = argument
    values: dict[str, Any] = {}
    spans: dict[str, Span] = {}
    for parameter in signature.parameters:
        found = chosen.get(parameter.name)
        if found is None:
            if parameter.default is REQUIRED:
                failed = True
                if parameter.name not in meant:  # a misspelt one has been reported
                    report.error(
                        "RLF1004",
                        f"`{signature.name}` needs `{parameter.name}`: {parameter.doc}",
                        Label(call.span, "missing here"),
                    )
            values[parameter.name] = parameter.default
            continue
        spans[parameter.name] = found.value.span
        try:
            values[parameter.name] = accept(parameter, found.value, scope, report, special)
        except Poison:
            failed = True
    extras: dict[str, Any] = {}
    for name, argument in extra.items():
        try:
            extras[name] = plain(evaluate(argument.value, scope.constants, report))
        except Poison:
            failed = True
    if failed:
        raise Poison()
    return Bound(values, spans, extras)


def accept(parameter: Parameter, expr: nodes.Expr, scope: Scope, report: Reporter, special: Special) -> Any:
    """The value of one argument in base units; raises Poison after reporting."""
    accepts = parameter.accepts
    if isinstance(accepts, Word):
        return _word(parameter, accepts, expr, scope, report)
    if isinstance(accepts, Text | Flag | Whole | Real | Count | Duration):
        value = evaluate(expr, scope.constants, report)
        if value is None and parameter.optional:
            return None
        return convert(parameter.name, accepts, value, expr.span, scope, report)
    return special(parameter, expr)


def _word(parameter: Parameter, accepts: Word, expr: nodes.Expr, scope: Scope, report: Reporter) -> str:
    word: Value
    if isinstance(expr, nodes.Name) and expr.id not in scope.constants:
        word = expr.id
    else:
        word = evaluate(expr, scope.constants, report)
    if isinstance(word, str) and word in accepts.choices:
        return word
    if isinstance(word, str):
        raise report.unknown(f"`{parameter.name}`:", word, Label(expr.span), list(accepts.choices))
    raise report.error(
        "RLF1007", f"`{parameter.name}` is {one_of(accepts.choices)}", Label(expr.span, f"this is {describe(word)}")
    )


def convert(name: str, accepts: Accepts, value: Value, span: Span, scope: Scope, report: Reporter) -> Any:
    """A constant checked against a type, in base units."""

    def wrong(wanted: str) -> Poison:
        return report.error("RLF1007", f"`{name}` is {wanted}", Label(span, f"this is {describe(value)}"))

    match accepts:
        case Text():
            if isinstance(value, str):
                return value
            raise wrong("a text in quotes")
        case Flag():
            if isinstance(value, bool):
                return value
            raise wrong("`true` or `false`")
        case Whole() | Real():
            wanted = "a whole number" if isinstance(accepts, Whole) else "a number"
            if not isinstance(value, Qty):
                raise wrong(wanted)
            if value.dimension is not None:
                raise report.error(
                    "RLF1005", f"`{name}` is {wanted} without a unit", Label(span, f"this is {describe(value)}")
                )
            number = value.number
            if isinstance(accepts, Whole):
                if number != int(number):
                    raise wrong(wanted)
                number = int(number)
            _check_range(name, accepts, number, span, report)
            return number if isinstance(accepts, Whole) else float(number)
        case Count():
            return _count(name, accepts, value, span, scope, report)
        case Duration():
            if not isinstance(value, Qty):
                raise wrong(f"a time such as `{EXAMPLES['time']}`")
            if value.dimension != "time":
                raise report.error(
                    "RLF1005",
                    f"`{name}` is a time, and {describe(value)} is none",
                    Label(span),
                    help=(f"write a unit, for example `{EXAMPLES['time']}`",),
                )
            if not 1 <= round(value.number) <= MOST:
                bound = "at least 1 us" if value.number < 1 else f"at most {MOST // 10**6} s"
                raise report.error("RLF1010", f"`{name}` must be {bound}", Label(span))
            return round(value.number)
    raise AssertionError(accepts)


def _check_range(name: str, accepts: Whole | Real, number: float, span: Span, report: Reporter) -> None:
    least, most = accepts.least, accepts.most
    opened = isinstance(accepts, Real) and accepts.open_least
    low = least is not None and (number < least or (opened and number == least))
    high = most is not None and number > most
    if not (low or high):
        return
    bounds = []
    if least is not None:
        bounds.append(f"{'above' if opened else 'at least'} {least:g}")
    if most is not None and (high or most != MOST):
        bounds.append(f"at most {most:g}")
    raise report.error("RLF1010", f"`{name}` must be {' and '.join(bounds)}, and is {number:g}", Label(span))


def _count(name: str, accepts: Count, value: Value, span: Span, scope: Scope, report: Reporter) -> int:
    if not isinstance(value, Qty):
        raise report.error(
            "RLF1007", f"`{name}` is a number of {accepts.unit}", Label(span, f"this is {describe(value)}")
        )
    if value.dimension is None and not scope.is_override(span):
        raise report.error(
            "RLF1005",
            f"`{name}` counts {accepts.unit}, and this number has no unit",
            Label(span),
            help=(f"write `{value.number:g} {accepts.unit}`",),
        )
    if value.dimension not in (None, accepts.unit):
        kind = "counts" if value.dimension in COUNTS else "is measured as"
        raise report.error(
            "RLF1005",
            f"`{name}` counts {accepts.unit}, and `{span.text}` {kind} {value.dimension}",
            Label(span, f"expected {accepts.unit}"),
        )
    if value.number != int(value.number) or value.number < accepts.least:
        raise report.error(
            "RLF1010",
            f"`{name}` must be a whole number of {accepts.unit}, at least {accepts.least}, and is {value.number:g}",
            Label(span),
        )
    if value.number > accepts.most:
        raise report.error(
            "RLF1010", f"`{name}` must be at most {accepts.most} {accepts.unit}, and is {value.number:g}", Label(span)
        )
    return int(value.number)


def plain(value: Value) -> Any:
    """A constant as a plain Python value for arguments that are passed on."""
    if isinstance(value, Qty):
        return value.number
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return value
