"""Expressions whose value is known at compile time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from operator import eq, ge, gt, le, lt, ne

from rlflow.diagnostics import Diagnostic, Label, Severity, did_you_mean
from rlflow.frontend.units import UNITS
from rlflow.grammar import nodes
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Qty:
    """A number with a dimension, in its base unit; dimension None = a plain number."""

    number: int | float
    dimension: str | None = None


Value = Qty | str | bool | None | tuple["Value", ...]


_ORDER: dict[str, Callable[[float, float], bool]] = {
    "==": eq,
    "!=": ne,
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
}

LARGEST = 1e300
"""Of any number; whatever is smaller can be a float, and so can its product with a unit."""


class Poison(Exception):
    """A problem has been reported; whatever depends on the value is skipped, so that it is reported once."""


@dataclass
class Reporter:
    """Collects diagnostics of one compile."""

    diagnostics: list[Diagnostic] = field(default_factory=list)

    def error(
        self, code: str, message: str, *labels: Label, notes: tuple[str, ...] = (), help: tuple[str, ...] = ()
    ) -> Poison:
        """Report an error; `raise reporter.error(...)` also skips what depends on it."""
        self.diagnostics.append(Diagnostic(code, message, labels, notes, help))
        return Poison()

    def warning(
        self, code: str, message: str, *labels: Label, notes: tuple[str, ...] = (), help: tuple[str, ...] = ()
    ) -> None:
        self.diagnostics.append(Diagnostic(code, message, labels, notes, help, Severity.WARNING))

    def unknown(self, what: str, ident_text: str, label: Label, candidates: list[str], code: str = "RLF1001") -> Poison:
        """Report a name that resolves to nothing, with the nearest that would."""
        guess = did_you_mean(ident_text, candidates)
        help_lines = (f"did you mean `{guess}`?",) if guess else ()
        notes: tuple[str, ...] = ()
        if not guess and candidates:
            notes = ("known here: " + ", ".join(f"`{c}`" for c in sorted(candidates)),)
        return self.error(code, f"unknown {what} `{ident_text}`", label, notes=notes, help=help_lines)

    @property
    def has_errors(self) -> bool:
        return any(d.severity is Severity.ERROR for d in self.diagnostics)


def is_constant(expr: nodes.Expr, scope: Mapping[str, Value]) -> bool:
    """Whether the expression is built from literals and parameters only."""
    match expr:
        case nodes.Number() | nodes.Quantity() | nodes.String() | nodes.Constant():
            return True
        case nodes.Name():
            return expr.id in scope
        case nodes.ListOf():
            return all(is_constant(item, scope) for item in expr.items)
        case nodes.Binary():
            return is_constant(expr.left, scope) and is_constant(expr.right, scope)
        case nodes.Compare() | nodes.Logic():
            return is_constant(expr.left, scope) and is_constant(expr.right, scope)
        case nodes.Negate() | nodes.Not():
            return is_constant(expr.operand, scope)
        case nodes.Conditional():
            return all(is_constant(part, scope) for part in (expr.then, expr.condition, expr.otherwise))
    return False


def evaluate(expr: nodes.Expr, scope: Mapping[str, Value], report: Reporter) -> Value:
    """The value of a constant expression; raises Poison after reporting when it has none."""
    match expr:
        case nodes.Number():
            return _finite(Qty(expr.value), expr, report)
        case nodes.Quantity():
            unit = UNITS.get(expr.unit)
            if unit is None:
                raise report.unknown("unit", expr.unit, Label(expr.span), sorted(UNITS), code="RLF1006")
            _finite(Qty(expr.value), expr, report)
            number = expr.value if unit.scale == 1 else expr.value * unit.scale
            return _finite(Qty(number, unit.dimension), expr, report)
        case nodes.String():
            return expr.value
        case nodes.Constant():
            return expr.value
        case nodes.Name():
            if expr.id not in scope:
                raise report.unknown("name", expr.id, Label(expr.span), [*sorted(scope), "true", "false", "none"])
            return scope[expr.id]
        case nodes.ListOf():
            return tuple(evaluate(item, scope, report) for item in expr.items)
        case nodes.Negate():
            operand = evaluate(expr.operand, scope, report)
            if not isinstance(operand, Qty):
                raise report.error("RLF1007", "`-` needs a number", Label(expr.operand.span, describe(operand)))
            return Qty(-operand.number, operand.dimension)
        case nodes.Binary():
            return _finite(_binary(expr, scope, report), expr, report)
        case nodes.Compare():
            return _compare(expr, scope, report)
        case nodes.Logic():
            left = truth(expr.left, scope, report)
            return left if left == (expr.operator == "or") else truth(expr.right, scope, report)
        case nodes.Not():
            return not truth(expr.operand, scope, report)
        case nodes.Conditional():
            chosen = expr.then if truth(expr.condition, scope, report) else expr.otherwise
            return evaluate(chosen, scope, report)
    raise report.error("RLF1007", "a constant is needed here, known before the run", Label(expr.span))


def truth(expr: nodes.Expr, scope: Mapping[str, Value], report: Reporter) -> bool:
    """The value of a condition; raises Poison after reporting when it is not true or false."""
    value = evaluate(expr, scope, report)
    if isinstance(value, bool):
        return value
    raise report.error(
        "RLF1007",
        "a condition is true or false",
        Label(expr.span, f"this is {describe(value)}"),
        help=("compare it, for example with `> 0`",) if isinstance(value, Qty) else (),
    )


def _compare(expr: nodes.Compare, scope: Mapping[str, Value], report: Reporter) -> bool:
    left = evaluate(expr.left, scope, report)
    right = evaluate(expr.right, scope, report)
    if isinstance(left, Qty) and isinstance(right, Qty):
        if left.dimension != right.dimension:
            raise report.error("RLF1005", f"cannot compare {describe(left)} with {describe(right)}", Label(expr.span))
        return _ORDER[expr.operator](left.number, right.number)
    if expr.operator not in ("==", "!="):
        side, value = (expr.right, right) if isinstance(left, Qty) else (expr.left, left)
        raise report.error(
            "RLF1007", f"`{expr.operator}` needs numbers", Label(side.span, f"this is {describe(value)}")
        )
    if left is not None and right is not None and type(left) is not type(right):
        raise report.error("RLF1007", f"cannot compare {describe(left)} with {describe(right)}", Label(expr.span))
    return (left == right) == (expr.operator == "==")


def _finite(value: Qty, expr: nodes.Expr, report: Reporter) -> Qty:
    if abs(value.number) <= LARGEST:
        return value
    raise report.error("RLF1010", "this number is too large", Label(expr.span), notes=(f"the largest is {LARGEST:g}",))


def _binary(expr: nodes.Binary, scope: Mapping[str, Value], report: Reporter) -> Qty:
    left = evaluate(expr.left, scope, report)
    right = evaluate(expr.right, scope, report)
    for side, value in ((expr.left, left), (expr.right, right)):
        if not isinstance(value, Qty):
            raise report.error("RLF1007", f"`{expr.operator}` needs numbers", Label(side.span, describe(value)))
    assert isinstance(left, Qty)
    assert isinstance(right, Qty)
    if expr.operator in "+-":
        if left.dimension != right.dimension:
            raise report.error(
                "RLF1005",
                f"cannot {'add' if expr.operator == '+' else 'subtract'} {describe(left)} and {describe(right)}",
                Label(expr.span),
            )
        sign = 1 if expr.operator == "+" else -1
        return Qty(left.number + sign * right.number, left.dimension)
    if expr.operator == "*":
        if left.dimension and right.dimension:
            raise report.error("RLF1005", f"cannot multiply {describe(left)} by {describe(right)}", Label(expr.span))
        return Qty(left.number * right.number, left.dimension or right.dimension)
    if right.number == 0:
        raise report.error("RLF1010", "division by zero", Label(expr.right.span))
    quotient = left.number / right.number
    if isinstance(left.number, int) and isinstance(right.number, int) and left.number % right.number == 0:
        quotient = left.number // right.number
    if left.dimension == right.dimension:
        return Qty(quotient)
    if right.dimension is None:
        return Qty(quotient, left.dimension)
    raise report.error("RLF1005", f"cannot divide {describe(left)} by {describe(right)}", Label(expr.span))


def describe(value: Value) -> str:
    """A value in words: `64 prompts`, `the text "x"`, `none`."""
    match value:
        case Qty():
            if value.dimension is None:
                return f"the plain number {value.number:g}"
            if value.dimension == "time":
                return f"{value.number / 1e6:g} s"
            if value.dimension == "share":
                return f"{value.number * 100:g}%"
            if value.dimension in ("memory", "bandwidth", "compute"):
                return f"{value.number:g} ({value.dimension})"
            return f"{value.number:g} {value.dimension}"
        case bool():
            return "true" if value else "false"
        case None:
            return "none"
        case str():
            return f'the text "{value}"'
    return "a list"
