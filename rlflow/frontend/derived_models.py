"""Models made from other models: `frozen(model)` and `value(model)`, on a copy or on a shared body."""

from __future__ import annotations

from collections.abc import Mapping, Set

from rlflow.diagnostics import Label
from rlflow.frontend.bind import Bound
from rlflow.frontend.constants import Reporter
from rlflow.grammar import nodes
from rlflow.ir import ops
from rlflow.ir.flow import Model


def derived_source(
    word: str, bound: Bound, models: Mapping[str, Model], declared_at: Mapping[str, nodes.Ident], report: Reporter
) -> ops.FrozenModel | ops.ValueModel:
    """The source of `frozen(model)` or `value(model, shared)`; raises Poison after reporting."""
    of: str = bound["of"]
    source = models[of].source
    if isinstance(source, ops.RewardModel | ops.ValueModel) and word == "value":
        raise report.error(
            "RLF1007", f"`{of}` is no language model to start a value model from", Label(bound.spans["of"])
        )
    if isinstance(source, ops.RewardModel):
        raise report.error("RLF1007", f"`{of}` is never trained: it needs no copy", Label(bound.spans["of"]))
    if word == "frozen":
        return ops.FrozenModel(of=of)
    if bound["shared"]:
        _check_shared(of, bound, models, declared_at, report)
    return ops.ValueModel(of=of, shared=bound["shared"])


def _check_shared(
    of: str, bound: Bound, models: Mapping[str, Model], declared_at: Mapping[str, nodes.Ident], report: Reporter
) -> None:
    """A shared body belongs to a model that is trained itself, and carries one head; raises Poison after reporting."""
    label = Label(bound.spans["of"])
    if isinstance(models[of].source, ops.FrozenModel):
        raise report.error(
            "RLF1021",
            f"`{of}` is frozen: a value head on its body could not be trained together with it",
            label,
            help=("share the body of the model that is trained, or leave `shared` out for a copy",),
        )
    other = shared_critic_of(of, models)
    if other is not None:
        raise report.error(
            "RLF1021",
            f"`{of}` has a value head already, `{other}`",
            label,
            Label(declared_at[other].span, "declared here", primary=False),
            help=("leave `shared` out for a value model of its own",),
        )


def shared_critic_of(model: str, models: Mapping[str, Model]) -> str | None:
    """The value model that is a head on this model's own body; None without one."""
    for name, declared in models.items():
        if isinstance(declared.source, ops.ValueModel) and declared.source.shared and declared.source.of == model:
            return name
    return None


def check_trained(
    models: Mapping[str, Model], trained: Set[str], declared_at: Mapping[str, nodes.Ident], report: Reporter
) -> None:
    """What only a `train` of its model makes useful has one: a shared value head (else an error), adapters."""
    for name, declared in models.items():
        source, label = declared.source, Label(declared_at[name].span)
        if isinstance(source, ops.ValueModel) and source.shared and source.of not in trained:
            report.error(
                "RLF1021",
                f"`{name}` is a value head on `{source.of}`, which this flow does not train",
                label,
                help=("leave `shared` out for a value model with a `train` of its own",),
            )
        if getattr(source, "lora", None) is not None and name not in trained:
            report.warning(
                "RLF1013",
                f"the adapters of `{name}` are never trained, so it computes what it would without them",
                label,
                help=("leave `lora` out",),
            )
