"""Tensor parallelism of linear layers with low-rank adapters: A and B are cut as `rlflow.reshard.adapters` says, so
that what a rank adds to its part of a layer's output is its part of the adapter's.

A layer whose outputs are cut: every rank has A whole and its rows of B; gradients of A are sums over the ranks. A layer
whose inputs are cut: every rank has its columns of A, and A's outputs, which are short, are summed before B, which
every rank has whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from rlflow.backends.ray_runtime.adapters import NAME
from rlflow.backends.ray_runtime.parallel.collectives import leave
from rlflow.backends.ray_runtime.parallel.weights import of_adapter


class _Whole(ParallelStyle):  # type: ignore[misc]
    """A of a layer whose outputs are cut."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(plain_input)
        return module


class _Cut(ParallelStyle):  # type: ignore[misc]
    """B's rows or A's columns: part `index` of `parts` along `dim`. Over `group` outputs are summed."""

    def __init__(self, dim: int, parts: int, index: int, group: dist.ProcessGroup | None = None) -> None:
        self.dim, self.parts, self.index, self.group = dim, parts, index, group

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole: Any = module.weight
        part = whole.detach().chunk(self.parts, self.dim)[self.index].clone()
        module.register_parameter("weight", nn.Parameter(part, requires_grad=whole.requires_grad))
        if self.group is not None:
            group = self.group
            module.register_forward_hook(lambda _, __, output: leave(output, group))
        return module


def with_adapters(
    layer: nn.Module, plan: Mapping[str, ParallelStyle], group: dist.ProcessGroup, kv_heads: int
) -> dict[str, ParallelStyle]:
    """Styles by module name for `layer`, from those of its linear layers as they would be without adapters."""
    tp, rank = group.size(), group.rank()
    found: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        if not hasattr(layer.get_submodule(name), "lora_A"):
            found[name] = style
            continue
        found[f"{name}.base_layer"] = style
        a, b = f"{name}.lora_A.{NAME}", f"{name}.lora_B.{NAME}"
        if isinstance(style, RowwiseParallel):
            found[a] = _Cut(1, tp, rank, group)
            continue
        of_heads = name.endswith(("k_proj", "v_proj")) and kv_heads < tp
        parts = kv_heads if of_heads else tp
        found[a], found[b] = _Whole(), _Cut(0, parts, rank * parts // tp)
    return found


def plain_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A replicated DTensor as a plain tensor, whose gradient is a part of the whole one."""
    first = inputs[0]
    return (first.to_local(grad_placements=[Partial()]), *inputs[1:]) if isinstance(first, DTensor) else inputs


def linear(module: Any) -> Any:
    """The linear layer below an adapter, or the module itself."""
    return getattr(module, "base_layer", module)


def adapter_parameters(model: nn.Module) -> set[nn.Parameter]:
    """All A and B."""
    return {parameter for name, parameter in model.named_parameters() if of_adapter(name)}
