"""`lora(...)` of a model declaration: its numbers, and the layers that get an adapter."""

from __future__ import annotations

from typing import Any

from rlflow.cluster.presets.architecture import Architecture
from rlflow.diagnostics import Label, Span
from rlflow.frontend.bind import Bound, Scope, bind
from rlflow.frontend.constants import Poison, Reporter, evaluate
from rlflow.frontend.declaration_signatures import ADAPTERS
from rlflow.frontend.parameters import Modules, Parameter
from rlflow.grammar import nodes
from rlflow.ir.ops import Lora
from rlflow.values import dataclass

CHOICES = ("attention", "all_linear")
DENSE_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a dense decoder with grouped-query attention, as transformers names them."""


@dataclass(frozen=True, slots=True)
class Written:
    """An adapter and where its layers are named."""

    lora: Lora
    targets: Span


def adapter(expr: nodes.Expr, scope: Scope, report: Reporter) -> Written | None:
    """What `lora = ...` gives; None for `none`. Raises Poison after reporting."""
    if not (isinstance(expr, nodes.Call) and isinstance(expr.function, nodes.Name) and expr.function.id in ADAPTERS):
        named = isinstance(expr, nodes.Name | nodes.Call)
        if not named and evaluate(expr, scope.constants, report) is None:
            return None
        raise report.error(
            "RLF1007", "`lora` is a call of `lora`, or `none`", Label(expr.span), help=("`lora = lora(rank = 16)`",)
        )

    def targets(parameter: Parameter, value: nodes.Expr) -> Any:
        assert isinstance(parameter.accepts, Modules)
        return _targets(value, scope, report)

    bound = bind(expr, ADAPTERS[expr.function.id], scope, report, targets)
    _check_dropout(bound, report)
    rank: int = bound["rank"]
    alpha = 2.0 * rank if bound["alpha"] is None else bound["alpha"]
    lora = Lora(rank=rank, alpha=alpha, targets=bound["targets"], init_seed=bound["init_seed"])
    return Written(lora, bound.spans.get("targets", expr.span))


def _check_dropout(bound: Bound, report: Reporter) -> None:
    if bound["dropout"]:
        raise report.error(
            "RLF1010",
            f"`dropout` of `lora` must be 0, and is {bound['dropout']:g}",
            Label(bound.spans["dropout"]),
            notes=(
                "the trainer would drop parts of the adapters that the sampler uses: their log-probabilities of one"
                " token would differ, and no ratio would start at 1",
            ),
            help=("leave `dropout` out; a smaller `rank` or `weight_decay` of the optimizer holds adapters back",),
        )


def _targets(expr: nodes.Expr, scope: Scope, report: Reporter) -> str | tuple[str, ...]:
    if isinstance(expr, nodes.Name) and expr.id not in scope.constants:
        value: Any = expr.id
        if value not in CHOICES:
            raise report.unknown("`targets`:", value, Label(expr.span), list(CHOICES))
    else:
        value = evaluate(expr, scope.constants, report)
    if isinstance(value, str) and value in CHOICES:
        return value
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise report.error(
            "RLF1007",
            "`targets` is `attention`, `all_linear` or a list of module names",
            Label(expr.span),
            help=('for example `targets = ["q_proj", "v_proj"]`',),
        )
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise report.error("RLF1002", f"`targets` names `{repeated[0]}` twice", Label(expr.span))
    return names


def check_targets(written: Written, model: str, architecture: Architecture | None, report: Reporter) -> None:
    """The named layers exist, where the architecture is known; raises Poison after reporting those that do not.

    A name is the end of a module's path: `q_proj`, or `self_attn.q_proj`. Of an architecture that is not known here
    the run checks the names.
    """
    if isinstance(written.lora.targets, str) or architecture is None:
        return
    facts = architecture.facts
    if facts.get("kind") != "dense" or facts.get("attention") != "gqa":
        return
    unknown = [name for name in written.lora.targets if name.rpartition(".")[2] not in DENSE_LAYERS]
    for name in unknown:
        report.unknown(f"linear layer of `{model}`:", name, Label(written.targets), list(DENSE_LAYERS))
    if unknown:
        raise Poison()
