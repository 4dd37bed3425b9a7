"""Weights that stay what they are for a whole run, laid out once as the device's matrix unit reads them.

Which are those: of a model that no stage of the plan trains, no reshard writes, no engine samples from and no pool
swaps, whole on this rank, in bf16, and with tensors of its own. Of the others, a plain copy into the new format would
be read as other numbers: the update's, the reshard's, the swap's.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlflow.backends.ray_runtime.kernels.format_cast import fits, format_cast
from rlflow.backends.ray_runtime.kernels.kernel import TORCH
from rlflow.ir.ops import Train
from rlflow.plan import MoveObject

if TYPE_CHECKING:
    from rlflow.backends.ray_runtime.state import RankState


def cast_frozen(state: RankState) -> dict[str, int]:
    """Lay out the frozen weights of this rank's models; returns how many of each model.

    Nothing happens where the kernel `format_cast` is torch's. Elsewhere the linear layers of a frozen model hold bf16
    afterwards: what autocast makes of their float32 in every product, so that the products are the same numbers.
    Embeddings, norms, routers and experts stay: only a linear layer's weight goes into its product as it is.
    """
    if format_cast.choice(state.device.kind) == TORCH:
        return {}
    return {name: _cast(state, name) for name in state.models if is_frozen(state, name)}


def is_frozen(state: RankState, name: str) -> bool:
    """Whether nothing writes or moves this model's weights during the run."""
    model, plan = state.models[name], state.plan
    trained = any(isinstance(stage.op, Train) and stage.op.model == name for stage in plan.stages)
    written = any(reshard.model == name for reshard in plan.reshards)
    # A pool that moves anything moves everything for an evaluation or a checkpoint.
    moved = any(
        isinstance(instruction, MoveObject)
        for program in plan.programs
        if program.pool == state.pool
        for instruction in program.step
    )
    cut = model.mesh is not None or model.engine is not None
    return not (trained or written or moved or cut) and model.compute == "bf16" and not _shares(state, name)


def _shares(state: RankState, name: str) -> bool:
    """Whether another model looks at this one's tensors: a policy with adapters, or one with a value head."""
    mine = _storages(state.models[name].loaded.model)
    others = (model.loaded for other, model in state.models.items() if other != name)
    return any(mine & _storages(loaded.model) for loaded in others)


def _storages(model: nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


def _cast(state: RankState, name: str) -> int:
    model = state.models[name].loaded.model
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    count = 0
    for module in model.modules():
        if type(module) is nn.Linear and uses[id(module.weight)] == 1 and fits(module.weight):
            module.weight.requires_grad_(False)
            module.weight.data = format_cast(module.weight.detach().to(torch.bfloat16))
            count += 1
    return count
