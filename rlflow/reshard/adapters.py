"""The tensors of low-rank adapters, and how parallelism divides them: as the layers that they are beside."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlflow.reshard.catalogue import Catalogue, Rule, TensorSpec

if TYPE_CHECKING:
    from rlflow.ir.flow import Layout
    from rlflow.ir.sources import Lora

ROUTER = ".mlp.gate.weight"
"""Of a mixture of experts: a weight that no linear layer has, so that it gets no adapter."""


def adapter_layout(layout: Layout) -> Layout:
    """How adapters lie in a layout of their model: no experts have any, and every replica has all of its own."""
    return replace(layout, ep=1, etp=1, zero=0)


def adapted(tensors: Catalogue, lora: Lora) -> Catalogue:
    """The weights of a model that get an adapter: linear layers of the decoder, those that the targets name."""
    chosen = tuple(spec for spec in tensors if _is_linear(spec) and _is_target(spec, lora))
    return replace(tensors, tensors=chosen)


def adapters_of(tensors: Catalogue, lora: Lora) -> Catalogue:
    """A [rank, in] and B [out, rank] of every adapted layer.

    B is cut where the layer's outputs are, A where its inputs are; what neither cuts every rank has, so that a rank can
    add its part of B A to its part of the layer without asking others.
    """
    found: list[TensorSpec] = []
    for spec in adapted(tensors, lora):
        out, inner = spec.shape
        name = spec.name.removesuffix(".weight")
        outer = replace(spec, name=f"{name}.lora_B.weight", shape=(out, lora.rank), fused="")
        down = replace(spec, name=f"{name}.lora_A.weight", shape=(lora.rank, inner), fused="")
        if spec.rule is Rule.REPLICATE or spec.dim == 0:
            down = replace(down, rule=Rule.REPLICATE, dim=0, units=0)
        if spec.rule is Rule.REPLICATE or spec.dim == 1:
            outer = replace(outer, rule=Rule.REPLICATE, dim=0, units=0)
        found += [down, outer]
    return replace(tensors, tensors=tuple(found))


def _is_linear(spec: TensorSpec) -> bool:
    return len(spec.shape) == 2 and spec.name.startswith("model.layers.") and not spec.name.endswith(ROUTER)


def _is_target(spec: TensorSpec, lora: Lora) -> bool:
    if lora.targets == "all_linear":
        return True
    path = spec.name.removesuffix(".weight")
    if lora.targets == "attention":
        return ".self_attn." in path
    return any(path == target or path.endswith(f".{target}") for target in lora.targets)
