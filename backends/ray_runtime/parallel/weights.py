"""Which part of every weight a rank holds: the rules of `rlflow.reshard.catalogue`, on the names of transformers.

A matrix is [out, in]. transformers keeps the experts of a layer as `experts.gate_up_proj` [experts, 2 x inner, hidden],
gate above up, and `experts.down_proj` [experts, hidden, inner]. A layer with an adapter (parallel/adapters.py) has its
weight as `base_layer.weight`, `lora_A.default.weight` [rank, in] and `lora_B.default.weight` [out, rank].
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from rlflow.backends.ray_runtime.parallel.mesh import Place
from rlflow.ir.flow import Layout
from rlflow.reshard.placements import chunk

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
Box = tuple[slice, ...]


class Rule(Enum):
    """How a weight is divided within a pipeline stage."""

    WHOLE = "whole"
    ROWS = "rows"
    """Dimension 0 over tp."""
    COLUMNS = "columns"
    """Dimension 1 over tp."""
    KV = "kv"
    """Dimension 0 over tp by key-value head; with more ranks than heads consecutive ranks hold the same head."""
    VOCABULARY = "vocabulary"
    """Dimension 0 over tp after padding."""
    EXPERTS_UP = "experts up"
    """Dimension 0 over ep, each half of dimension 1 over etp."""
    EXPERTS_DOWN = "experts down"
    """Dimension 0 over ep, dimension 2 over etp."""

    @property
    def of_experts(self) -> bool:
        return self in (Rule.EXPERTS_UP, Rule.EXPERTS_DOWN)


_RULES: tuple[tuple[re.Pattern[str], Rule], ...] = (
    (re.compile(r"\.experts\.gate_up_proj$"), Rule.EXPERTS_UP),
    (re.compile(r"\.experts\.down_proj$"), Rule.EXPERTS_DOWN),
    (re.compile(r"\.(q_proj|gate_proj|up_proj)\.(base_layer\.|lora_B\.\w+\.)?(weight|bias)$"), Rule.ROWS),
    (re.compile(r"\.(k_proj|v_proj)\.(base_layer\.|lora_B\.\w+\.)?(weight|bias)$"), Rule.KV),
    (re.compile(r"\.(o_proj|down_proj)\.(base_layer\.|lora_A\.\w+\.)?weight$"), Rule.COLUMNS),
    (re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$"), Rule.VOCABULARY),
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SUMMED_OVER_TP = re.compile(r"\.(q_norm|k_norm)\.weight$")
_LAYER_NORM = re.compile(r"\.layers\.\d+\.\w+_layernorm\.weight$")
_ADAPTER_OF_ROWS = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.lora_A\.\w+\.weight$")
_ROUTER = re.compile(r"\.mlp\.gate\.weight$")


def rule_of(name: str) -> Rule:
    return next((rule for pattern, rule in _RULES if pattern.search(name)), Rule.WHOLE)


def of_adapter(name: str) -> bool:
    """Whether it is an A or B."""
    return ".lora_" in name


def layer_of(name: str) -> int | None:
    """The global number of the layer that a weight belongs to."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def summed_over_tp(name: str, layout: Layout) -> bool:
    """Whether a whole weight is used by every tensor-parallel rank for a part of the work only."""
    if layout.sp and _LAYER_NORM.search(name):
        return True
    if _ADAPTER_OF_ROWS.search(name):
        return True
    return bool(_SUMMED_OVER_TP.search(name) or (divides_experts(layout) and _ROUTER.search(name)))


def divides_experts(layout: Layout) -> bool:
    """Whether the tokens of a mixture of experts are dealt out over ranks."""
    return layout.ep > 1 or layout.etp > 1 or layout.tp > 1


@dataclass(frozen=True)
class Spec:
    """One weight of the whole model."""

    name: str
    """As in the transformers state dict."""
    shape: tuple[int, ...]
    rule: Rule
    kv_heads: int

    def boxes(self, layout: Layout, place: Place) -> list[tuple[Box, Box]]:
        """(box of the whole weight, box of the rank's local one), which tile what the rank holds, before ZeRO-3."""
        ndim = len(self.shape)
        whole = tuple(slice(0, extent) for extent in self.shape)
        if self.rule is Rule.WHOLE or (layout.tp == 1 and not self.rule.of_experts):
            return [(whole, whole)]
        if self.rule is Rule.EXPERTS_UP:
            experts = chunk(self.shape[0], layout.ep, place.ep)
            half = self.shape[1] // 2
            low, high = chunk(half, layout.etp, place.etp)
            found: list[tuple[Box, Box]] = []
            for part in range(2):
                at = (slice(*experts), slice(part * half + low, part * half + high), whole[2])
                mine = slice(part * (high - low), (part + 1) * (high - low))
                found.append((at, (slice(0, experts[1] - experts[0]), mine, whole[2])))
            return found
        if self.rule is Rule.EXPERTS_DOWN:
            cuts = {0: chunk(self.shape[0], layout.ep, place.ep), 2: chunk(self.shape[2], layout.etp, place.etp)}
        elif self.rule is Rule.COLUMNS:
            cuts = {1: chunk(self.shape[1], layout.tp, place.tp)}
        elif self.rule is Rule.KV and layout.tp > self.kv_heads:
            cuts = {0: chunk(self.shape[0], self.kv_heads, place.tp * self.kv_heads // layout.tp)}
        else:
            step = -(-self.shape[0] // layout.tp)
            low = min(place.tp * step, self.shape[0])
            cuts = {0: (low, min(low + step, self.shape[0]))}
        full = tuple(slice(*cuts[dim]) if dim in cuts else whole[dim] for dim in range(ndim))
        return [(full, tuple(slice(0, s.stop - s.start) for s in full))]

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """Padding included; before ZeRO-3."""
        shape = list(self.shape)
        if self.rule.of_experts:
            shape[0] //= layout.ep
            shape[1 if self.rule is Rule.EXPERTS_UP else 2] //= layout.etp
        elif self.rule is Rule.COLUMNS:
            shape[1] //= layout.tp
        elif self.rule is Rule.KV:
            shape[0] //= min(layout.tp, self.kv_heads)
        elif self.rule is not Rule.WHOLE:
            shape[0] = -(-shape[0] // layout.tp)
        return tuple(shape)

    def owner(self, layout: Layout, place: Place) -> bool:
        """Whether the rank is the first of its pipeline stage that holds its part; before ZeRO-3."""
        if self.rule.of_experts:
            return place.expert_replica == 0
        first = place.dp == place.cp == 0
        if self.rule is Rule.WHOLE:
            return first and place.tp == 0
        if self.rule is Rule.KV and layout.tp > self.kv_heads:
            return first and place.tp % (layout.tp // self.kv_heads) == 0
        return first

    def holders(self, layout: Layout) -> int:
        """Ranks of a pipeline stage that hold the same elements; before ZeRO-3."""
        replicas = layout.dp * layout.cp
        if self.rule.of_experts:
            return layout.expert_replicas
        if self.rule is Rule.WHOLE:
            return replicas * layout.tp
        if self.rule is Rule.KV:
            return replicas * max(1, layout.tp // self.kv_heads)
        return replicas


def specs_of(model: Any) -> dict[str, Spec]:
    """Every weight of a whole model, by its name in the state dict; a tied head is none of its own."""
    kv_heads = int(getattr(model.config, "num_key_value_heads", 0) or 0)
    return {
        name: Spec(name, tuple(parameter.shape), rule_of(name), kv_heads)
        for name, parameter in model.named_parameters()
    }


def reshard_views(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A local weight under the names of `rlflow.reshard`, as views: fused gate and up come apart."""
    if rule_of(name) is Rule.EXPERTS_UP:
        half = tensor.shape[1] // 2
        before = name.removesuffix("gate_up_proj")
        yield f"{before}gate_proj.weight", tensor[:, :half]
        yield f"{before}up_proj.weight", tensor[:, half:]
    elif rule_of(name) is Rule.EXPERTS_DOWN:
        yield f"{name}.weight", tensor
    else:
        yield name, tensor
