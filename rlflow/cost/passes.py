"""Seconds of one forward pass of a micro-batch through one pipeline stage.

A micro-batch meets the products of the stage at a share of peak, the traffic of element-wise operations (every kept
activation is written and read once), and collectives. What does not depend on the micro-batch is worked out once for a
model and a layout: a search asks for the same layout many times.
"""

from __future__ import annotations

from functools import lru_cache

from rlflow.cost.activations import BYTES, layer_activations
from rlflow.cost.collectives import Group, Network
from rlflow.cost.dimensions import Dimensions
from rlflow.cost.flops import attention_forward, dense_layer_products, head_products, moe_layer_products
from rlflow.cost.machine import Machine
from rlflow.cost.roofline import memory_seconds, product_seconds
from rlflow.cost.shards import Shard, StageLayers, expert_parameters, experts_on, layers_of, shard
from rlflow.cost.stages import ComputeOptions
from rlflow.ir.flow import Layout
from rlflow.values import dataclass

STREAMS = 4
"""Experts whose products run at the same time, as grouped products of Transformer Engine run on four streams."""


@dataclass(frozen=True, slots=True)
class Micro:
    """A mean micro-batch of one data-parallel replica."""

    count: int
    tokens: float
    squares: float


@dataclass(frozen=True, slots=True)
class StageWork:
    """One pipeline stage, or several that cost the same; FLOPs and bytes of one device, for one token of a replica."""

    stage: StageLayers
    stages: tuple[int, ...]
    """All pipeline stages like this one."""
    shard: Shard
    flops: float
    """Products of all but routed experts."""
    operations: int
    expert_flops: float
    expert_products: int
    """Every expert is a product of its own, up and down."""
    expert_bytes: float
    """Weights of the routed experts, read once a pass; not for one token."""
    attention: float
    """For one unit of the sum of squares."""
    kept: float
    scores: float
    """Also for every token of a sequence."""
    head_flops: float
    logits: float


@dataclass(frozen=True, slots=True)
class Networks:
    """Collectives of a layout on a machine."""

    tensor: Network
    context: Network
    experts: Network
    boundary: Network
    replicas: Network
    """Copies of dense parameters, for one byte of them."""
    expert_replicas: Network


@dataclass(frozen=True, slots=True)
class Forward:
    """Seconds of one stage's forward pass of a micro-batch."""

    products: float
    attention: float
    elementwise: float
    head: float
    """The output head with its logits: never computed again."""
    tensor_parallel: float
    context_parallel: float
    """All of it; part hides behind attention."""
    expert_parallel: float
    pipeline: float

    @property
    def compute(self) -> float:
        return self.products + self.attention + self.elementwise + self.head


@lru_cache(maxsize=8192)
def stage_works(model: Dimensions, layout: Layout, options: ComputeOptions) -> tuple[StageWork, ...]:
    """The kinds of pipeline stages that a layout has."""
    share = layout.tp * layout.cp
    each = layer_activations(model, layout, flash=options.flash, skew=options.skew)
    routed = model.top_k * model.expert
    kinds: dict[tuple[int, int, bool, bool], list[StageLayers]] = {}
    for stage in layers_of(model, layout):
        kinds.setdefault((stage.dense, stage.moe, stage.first, stage.last), []).append(stage)
    found = []
    for stages in kinds.values():
        stage = stages[0]
        dense = stage.dense * dense_layer_products(model) if stage.dense else 0
        rest = stage.moe * (moe_layer_products(model) - routed) if stage.moe else 0
        kept = stage.dense * each.dense + stage.moe * each.moe
        vocabulary = stage.last and options.head == "vocabulary"
        found.append(
            StageWork(
                stage=stage,
                stages=tuple(like.stage for like in stages),
                shard=shard(model, layout, stage, options.head),
                flops=2.0 * (dense + rest) / share,
                operations=4 * stage.layers,
                expert_flops=2.0 * stage.moe * routed * options.skew / share,
                expert_products=2 * stage.moe * -(-experts_on(model, layout) // STREAMS) if stage.moe else 0,
                expert_bytes=float(stage.moe * expert_parameters(model, layout) * options.precision.weights),
                attention=attention_forward(model, 1.0, stage.layers) / share,
                kept=kept / layout.cp,
                scores=stage.layers * each.scores / layout.cp,
                head_flops=2.0 * head_products(model, options.head) / share if stage.last else 0.0,
                logits=2 * 4.0 * model.vocab / share if vocabulary else 0.0,
            )
        )
    return tuple(found)


@lru_cache(maxsize=8192)
def networks(model: Dimensions, layout: Layout, machine: Machine, skew: float) -> Networks:
    """For one token of a replica: every collective is affine in its bytes, or the better or worse of two that are."""
    value = model.hidden * BYTES / layout.cp
    limit = model.expert_groups_of_token
    across = min(model.top_k, limit) / model.top_k if limit and model.top_k else 1.0
    rows = value * model.top_k * skew / layout.tp
    width = model.latent_kv + model.rope_size if model.is_latent else model.key_width + model.value_width
    ends = Network()
    if layout.pp > 1:
        inside = Group(layout.pp, layout.dp * layout.cp * layout.tp).all_inside(machine)
        link = machine.link_inside() if inside else machine.link_across()
        # Once a virtual stage; every tensor-parallel rank sends its part.
        ends = Network(((layout.vp * link.latency_s, layout.vp * value / layout.tp / link.bytes_per_s),))
    return Networks(
        tensor=Group(layout.tp).all_reduce_network(machine).scaled(value),
        context=Group(layout.cp, layout.tp).all_gather_network(machine).scaled(width * BYTES / layout.tp),
        experts=Group(layout.ep, layout.etp).all_to_all_network(machine, across).scaled(rows)
        if model.experts
        else Network(),
        boundary=ends,
        replicas=Group(layout.dp * layout.cp, layout.tp).all_gather_network(machine),
        expert_replicas=Group(layout.expert_replicas, layout.ep * layout.etp).all_gather_network(machine)
        if model.experts
        else Network(),
    )


def forward_pass(work: StageWork, joined: Networks, machine: Machine, micro: Micro, efficiency: float) -> Forward:
    """Two all-reduces a layer over tensor-parallel ranks, two exchanges a mixture-of-experts layer, keys and values of
    the whole sequence gathered over context-parallel ranks."""
    peak, rate, copy = machine.flop_per_s, machine.memory_bytes_per_s, machine.calibration.constants.memory_copy
    tokens, stage = micro.tokens, work.stage
    layers = stage.layers
    products = product_seconds(work.flops * tokens, peak, efficiency, work.operations)
    if stage.moe:
        # Few tokens an expert: its weights take longer to read than to use.
        products += max(
            product_seconds(work.expert_flops * tokens, peak, efficiency, work.expert_products),
            memory_seconds(work.expert_bytes, rate, copy, 2 * stage.moe),
        )
    head = 0.0
    if stage.last:
        head = product_seconds(work.head_flops * tokens, peak, efficiency)
        head += memory_seconds(work.logits * tokens, rate, copy)
    traffic = 2 * (work.kept * tokens + work.scores * micro.squares)
    return Forward(
        products=products,
        attention=product_seconds(work.attention * micro.squares, peak, efficiency, layers),
        elementwise=memory_seconds(traffic, rate, copy, 8 * layers or 1),
        head=head,
        tensor_parallel=2 * layers * joined.tensor.fastest(tokens),
        context_parallel=layers * joined.context.fastest(tokens),
        expert_parallel=2 * stage.moe * joined.experts.slowest(tokens),
        pipeline=joined.boundary.fastest(tokens),
    )
