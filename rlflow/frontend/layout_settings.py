"""Settings of a `place` line: how a model stage is sharded over its pool."""

from __future__ import annotations

from typing import Any

from rlflow.diagnostics import Label
from rlflow.frontend.bind import Scope, accept, convert
from rlflow.frontend.clusters import MAX_DEVICES
from rlflow.frontend.constants import Reporter, describe, evaluate
from rlflow.frontend.parameters import Flag, Parameter, Whole, Word
from rlflow.grammar import nodes

MAX_LAYERS = 10_000

_DEVICES = Whole(1, MAX_DEVICES)

LAYOUT_SETTINGS: dict[str, Parameter] = {
    parameter.name: parameter
    for parameter in (
        Parameter("tp", _DEVICES, None, "tensor parallel size"),
        Parameter("pp", _DEVICES, None, "pipeline stages"),
        Parameter("dp", _DEVICES, None, "data parallel replicas; the rest of the pool when left out"),
        Parameter("ep", _DEVICES, None, "groups that the experts of a layer are dealt out over"),
        Parameter(
            "cp", _DEVICES, None, "context parallel size: the tokens of a sequence are split, heads are exchanged"
        ),
        Parameter("etp", _DEVICES, None, "tensor parallel size of one expert; `tp` when left out"),
        Parameter("vp", _DEVICES, None, "virtual pipeline stages of a rank (interleaved schedule)"),
        Parameter("sp", Flag(), None, "sequence parallelism between tensor-parallel parts"),
        Parameter("zero", Whole(0, 3), None, "1 shards the optimizer, 2 gradients too, 3 weights too (FSDP)"),
        Parameter(
            "reshard", Word(("in_place", "beside")), None, "where weights trained on the same devices are laid out anew"
        ),
        Parameter("recompute", Word(("none", "selective", "full")), None, "what the backward pass computes again"),
    )
}
"""Everything but `split`, whose value is a list."""


def layout_setting(setting: nodes.Setting, scope: Scope, report: Reporter) -> Any:
    """The value of a setting of LAYOUT_SETTINGS or of `split`; raises Poison after reporting."""
    if setting.name.text == "recompute" and isinstance(setting.value, nodes.Constant) and setting.value.value is None:
        return "none"  # the word is a constant of the language
    if setting.name.text != "split":
        return accept(LAYOUT_SETTINGS[setting.name.text], setting.value, scope, report, _no_special)
    value = evaluate(setting.value, scope.constants, report)
    if not isinstance(value, tuple) or not value:
        raise report.error(
            "RLF1007",
            "`split` is the list of layers of every pipeline stage, such as `[8, 8, 7, 7]`",
            Label(setting.value.span, f"this is {describe(value)}"),
        )
    return tuple(convert("split", Whole(1, MAX_LAYERS), part, setting.value.span, scope, report) for part in value)


def _no_special(parameter: Parameter, expr: nodes.Expr) -> Any:
    raise AssertionError(f"{parameter.name} takes a constant")
