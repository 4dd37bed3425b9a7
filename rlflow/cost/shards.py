"""Which parameters one device of a layout holds.

Tensor parallelism splits heads, feed-forward widths and the vocabulary; norms, routers and the down-projections of
latent attention stand whole on every rank; key-value heads are copied once there are fewer of them than ranks. Experts
are dealt out over ep x etp devices of the same pipeline stage. Where a number does not divide, the larger part counts.
"""

from __future__ import annotations

from functools import lru_cache

from rlflow.cost.dimensions import Dimensions
from rlflow.cost.errors import LayoutError
from rlflow.cost.flops import Head
from rlflow.ir.flow import Layout
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The layers of one pipeline rank."""

    stage: int
    dense: int
    moe: int
    largest_chunk: int
    """Layers of its largest virtual stage."""
    first: bool
    last: bool

    @property
    def layers(self) -> int:
        return self.dense + self.moe


@dataclass(frozen=True, slots=True)
class Shard:
    """Parameters on one device."""

    dense: int
    """All but routed experts: copied over dp x cp."""
    expert: int
    """Routed experts: copied over the expert replicas."""
    largest_layer: int
    """Of the largest single layer, experts included."""
    embeddings: int
    """How many of `dense` are input embedding and output head."""

    @property
    def total(self) -> int:
        return self.dense + self.expert


def check_layout(model: Dimensions, layout: Layout) -> None:
    """LayoutError where the layout cannot describe this model at all. (Finer rules are the compiler's.)"""
    sizes = (layout.dp, layout.tp, layout.pp, layout.ep, layout.cp, layout.etp, layout.vp)
    if min(sizes) < 1:
        raise LayoutError(f"sizes of a layout are at least 1, not {min(sizes)}")
    if layout.zero not in (0, 1, 2, 3):
        raise LayoutError(f"zero is 0, 1, 2 or 3, not {layout.zero}")
    if (layout.dp * layout.cp * layout.tp) % (layout.ep * layout.etp):
        ranks = layout.dp * layout.cp * layout.tp
        raise LayoutError(f"ep {layout.ep} x etp {layout.etp} does not divide the {ranks} ranks of a pipeline stage")
    if model.experts and layout.ep > model.experts:
        raise LayoutError(f"`{model.name}` has {model.experts} experts, fewer than ep {layout.ep}")
    parts = layout.pp * layout.vp
    if layout.split:
        if len(layout.split) != parts or sum(layout.split) != model.layers or min(layout.split) < 0:
            raise LayoutError(
                f"the split has {len(layout.split)} parts of {sum(layout.split)} layers in all, "
                f"and `{model.name}` with pp {layout.pp} x vp {layout.vp} needs {parts} parts of {model.layers}"
            )
    elif model.layers % parts:
        raise LayoutError(
            f"pp {layout.pp} x vp {layout.vp} does not divide the {model.layers} layers of `{model.name}`"
        )


@lru_cache(maxsize=4096)
def stage_layers(layers: int, dense_layers: int, pp: int, vp: int, split: tuple[int, ...]) -> tuple[StageLayers, ...]:
    """The layers of every pipeline rank, in order."""
    parts = split or (layers // (pp * vp),) * (pp * vp)
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part)
    found = []
    for stage in range(pp):
        mine = range(stage, pp * vp, pp)
        total = sum(parts[i] for i in mine)
        dense = sum(max(0, min(starts[i + 1], dense_layers) - starts[i]) for i in mine)
        largest = max(parts[i] for i in mine)
        found.append(StageLayers(stage, dense, total - dense, largest, stage == 0, stage == pp - 1))
    return tuple(found)


def layers_of(model: Dimensions, layout: Layout) -> tuple[StageLayers, ...]:
    return stage_layers(model.layers, model.dense_layers, layout.pp, layout.vp, layout.split)


def kv_heads_on(model: Dimensions, tp: int) -> int:
    """Key-value heads of one rank: split while there are enough, then copied."""
    return max(1, _up(model.kv_heads, tp))


def attention_parameters(model: Dimensions, tp: int) -> int:
    """Of one layer on one device, with biases and norms of queries and keys."""
    hidden, heads = model.hidden, _up(model.heads, tp)
    if model.is_latent:
        q_rank, kv_rank, rope = model.latent_q, model.latent_kv, model.rope_size
        whole = hidden * (q_rank + kv_rank + rope) + q_rank + kv_rank
        queries = (q_rank or hidden) * heads * model.key_size
        up = kv_rank * heads * (model.key_size - rope + model.value_size)
        return whole + queries + up + heads * model.value_size * hidden
    kv = kv_heads_on(model, tp) * (model.key_size + model.value_size)
    count = hidden * (heads * model.key_size + kv) + heads * model.value_size * hidden
    if model.qkv_bias:
        count += heads * model.key_size + kv
    return count + (2 * model.key_size if model.qk_norm else 0)


def dense_layer_parameters(model: Dimensions, tp: int) -> int:
    ffn = model.ffn_matrices * model.hidden * _up(model.ffn, tp)
    return attention_parameters(model, tp) + model.norms * model.hidden + ffn


def moe_layer_parameters(model: Dimensions, tp: int) -> int:
    """All of a mixture-of-experts layer but its routed experts."""
    shared = model.ffn_matrices * model.hidden * _up(model.shared_ffn, tp)
    router = model.router + (model.experts if model.router_bias else 0)
    return attention_parameters(model, tp) + model.norms * model.hidden + router + shared


def experts_on(model: Dimensions, layout: Layout) -> int:
    """Routed experts of one layer that one device serves a part of."""
    return _up(model.experts, layout.ep)


def expert_parameters(model: Dimensions, layout: Layout) -> int:
    """Of one layer's routed experts on one device."""
    return experts_on(model, layout) * model.ffn_matrices * model.hidden * _up(model.expert_ffn, layout.etp)


def shard(model: Dimensions, layout: Layout, stage: StageLayers, head: Head = "vocabulary") -> Shard:
    """The parameters of one device of a pipeline stage."""
    tp = layout.tp
    dense_layer = dense_layer_parameters(model, tp) if stage.dense else 0
    moe_layer = moe_layer_parameters(model, tp) if stage.moe else 0
    experts = expert_parameters(model, layout) if stage.moe else 0
    vocabulary = _up(model.vocab, tp) * model.hidden
    embeddings = vocabulary if stage.first else 0
    last = 0
    if stage.last:
        last = model.hidden
        if head == "vocabulary" and not (model.tied and stage.first):
            embeddings += vocabulary  # a tied head on another rank than the embedding is a copy of it
        elif head == "scalar":
            last += model.hidden
    dense = stage.dense * dense_layer + stage.moe * moe_layer + embeddings + last
    return Shard(dense, stage.moe * experts, max(dense_layer, moe_layer + experts), embeddings)


def _up(number: int, parts: int) -> int:
    return -(-number // parts)
