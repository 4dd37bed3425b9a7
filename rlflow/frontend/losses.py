"""Loss expressions and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlflow.diagnostics import Label
from rlflow.frontend.bind import Scope, bind
from rlflow.frontend.constants import LARGEST, Poison, Qty, Reporter, describe, evaluate, is_constant
from rlflow.frontend.parameters import Parameter
from rlflow.frontend.signatures import LOSSES, OPTIMIZERS
from rlflow.grammar import nodes
from rlflow.ir import ops


def _no_special(parameter: Parameter, expr: nodes.Expr) -> Any:
    raise AssertionError(f"{parameter.name} takes a constant")


def loss_terms(expr: nodes.Expr, scope: Scope, report: Reporter) -> tuple[ops.LossTerm, ...]:
    """A sum of terms with factors, in the order written; raises Poison after reporting."""
    return tuple(
        _term(call, _finite(weight, call, report), scope, report)
        for weight, call in _summands(expr, 1.0, scope, report)
    )


def _finite(weight: float, expr: nodes.Expr, report: Reporter) -> float:
    if abs(weight) <= LARGEST:
        return weight
    raise report.error("RLF1010", "the factor of this loss term is too large", Label(expr.span))


def _summands(expr: nodes.Expr, weight: float, scope: Scope, report: Reporter) -> Iterator[tuple[float, nodes.Call]]:
    match expr:
        case nodes.Binary(operator="+" | "-"):
            yield from _summands(expr.left, weight, scope, report)
            yield from _summands(expr.right, weight if expr.operator == "+" else -weight, scope, report)
        case nodes.Negate():
            yield from _summands(expr.operand, -weight, scope, report)
        case nodes.Binary(operator="*") if is_constant(expr.left, scope.constants):
            yield from _summands(expr.right, weight * plain_number(expr.left, scope, report), scope, report)
        case nodes.Binary(operator="*" | "/") if is_constant(expr.right, scope.constants):
            factor = plain_number(expr.right, scope, report)
            if expr.operator == "/" and factor == 0:
                raise report.error("RLF1010", "division by zero", Label(expr.right.span))
            yield from _summands(expr.left, weight * factor if expr.operator == "*" else weight / factor, scope, report)
        case nodes.Call(function=nodes.Name()):
            yield weight, expr
        case _:
            raise report.error(
                "RLF1007", "a loss is a sum of terms, such as `ppo_clip(0.2) + 0.001 * kl(k3)`", Label(expr.span)
            )


def plain_number(expr: nodes.Expr, scope: Scope, report: Reporter) -> float:
    value = evaluate(expr, scope.constants, report)
    if not isinstance(value, Qty) or value.dimension is not None:
        raise report.error("RLF1005", "a factor is a plain number", Label(expr.span, f"this is {describe(value)}"))
    return float(value.number)


def _term(call: nodes.Call, weight: float, scope: Scope, report: Reporter) -> ops.LossTerm:
    assert isinstance(call.function, nodes.Name)
    word = call.function.id
    if word not in LOSSES:
        raise report.unknown("loss term", word, Label(call.function.span), sorted(LOSSES))
    bound = bind(call, LOSSES[word], scope, report, _no_special)
    if word == "kl" and bound["estimator"] == "k1" and weight != 0:
        report.warning(
            "RLF1017",
            "`kl(k1)` as a loss ignores the reference: its expected gradient is zero",
            Label(call.span),
            help=("use `kl(k3)` or `kl(k2)`; k1 belongs into the reward: `kl_reward(...)`",),
        )
    if weight < 0 and word != "entropy":
        report.warning(
            "RLF1020",
            f"`{word}` has the factor {weight:g}: training would make it larger",
            Label(call.span),
            help=("a loss is made smaller; only `entropy()` is meant to take a negative factor",),
        )
    values = dict(bound.values)
    if "low" in values:
        low, high = values.pop("low"), values.pop("high")
        values |= {"clip_low": low, "clip_high": low if high is None else high}
    return ops.LOSSES[word](weight=weight, **values)


def optimizer(expr: nodes.Expr, scope: Scope, report: Reporter) -> ops.AdamW:
    """The optimizer that a call names; raises Poison after reporting."""
    if not (isinstance(expr, nodes.Call) and isinstance(expr.function, nodes.Name)):
        raise report.error("RLF1007", "an optimizer is a call such as `adamw(lr = 1e-6)`", Label(expr.span))
    word = expr.function.id
    if word not in OPTIMIZERS:
        raise report.unknown("optimizer", word, Label(expr.function.span), sorted(OPTIMIZERS))
    bound = bind(expr, OPTIMIZERS[word], scope, report, _no_special)
    for beta in ("beta1", "beta2"):
        if bound[beta] >= 1:
            report.error("RLF1010", f"`{beta}` must be below 1", Label(bound.spans[beta]))
            raise Poison()
    return ops.AdamW(**bound.values)
