"""Seconds of one decode step: affine in the running requests b and in the tokens K they hold, for every band of b.

tau(b, K) = a(b) + c_b b + c_K K. The parts follow inference-sim (BLIS, fitted on vLLM): weights and keys and values are
read at a share of memory bandwidth, and the host adds so much a layer, a step and a request.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from math import exp, log1p

from rlflow.cost.collectives import Group
from rlflow.cost.components import MIXED, Precision
from rlflow.cost.dimensions import Dimensions
from rlflow.cost.errors import WorkloadError
from rlflow.cost.flops import decode_attention, decode_products, forward
from rlflow.cost.kv_cache import kv_bytes_per_token
from rlflow.cost.machine import Machine
from rlflow.cost.shards import check_layout, layers_of, shard
from rlflow.ir.flow import Layout
from rlflow.values import dataclass

PARTS = ("weights", "kv", "host", "tensor_parallel", "expert_parallel", "pipeline")


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Of one engine replica. Seconds unless said otherwise."""

    dense_read: float
    """Weights that every step reads, whatever runs."""
    expert_read: float
    """All routed experts of a device; a step reads those that its tokens chose."""
    experts_hit: float
    """ln(1 - k/E): of b tokens with uniform routing, 1 - exp(b ln(1 - k/E)) of the experts are chosen."""
    tokens_per_request: float
    """Tokens routed to the experts of this device's group for every running request of this engine."""
    compute: float
    """Products and attention folding, of a request."""
    kv_token: float
    """Reading keys and values of a held token, or the attention over it where that takes longer."""
    host: float
    request: float
    """Of a request beyond products and bytes: sampling, metadata, launches that grow with the batch."""
    reduce_latency: float
    reduce_request: float
    exchange_latency: float
    exchange_request: float
    boundary: float
    """Between pipeline stages."""
    stages: int = 1
    """Pipeline stages: so many groups of requests are under way, each a part of b."""
    buckets: tuple[int, ...] = ()
    """Batch sizes with a captured graph, ascending; a step is padded to the next. Beyond the last none is used."""

    def padded(self, b: float) -> float:
        """What a step of b requests is computed for."""
        index = bisect_left(self.buckets, b) if self.buckets else 0
        return float(self.buckets[index]) if index < len(self.buckets) else b

    def weights(self, b: float) -> float:
        """Reading weights, or computing with them where that takes longer."""
        read = self.dense_read
        if self.expert_read:
            read += self.expert_read * (1.0 - exp(self.experts_hit * self.tokens_per_request * b / self.stages))
        return max(read, self.compute * b)

    def parts(self, b: float, held: float) -> tuple[float, ...]:
        """Seconds by part, in the order of `PARTS`, of a step with b running requests that hold so many tokens."""
        padded = self.padded(b)
        return (
            self.weights(padded),
            self.kv_token * held,
            self.host + self.request * padded,
            self.reduce_latency + self.reduce_request * padded,
            self.exchange_latency + self.exchange_request * padded,
            self.boundary,
        )

    def seconds(self, b: float, held: float) -> float:
        return sum(self.parts(b, held))

    def affine(self, b: float) -> tuple[float, float, float]:
        """(a, c_b, c_K) that hold exactly at b, and near it while its band lasts.

        A request more costs what it adds at the margin, which is nothing inside a graph bucket.
        """
        marginal = 0.0
        if self.padded(b) == b:
            marginal = self.request + self.reduce_request + self.exchange_request
            if self.compute * b >= self.weights(b):
                marginal += self.compute
        return self.seconds(b, 0.0) - marginal * b, marginal, self.kv_token


@lru_cache(maxsize=8192)
def decode_step(
    model: Dimensions,
    layout: Layout,
    machine: Machine,
    *,
    precision: Precision = MIXED,
    buckets: tuple[int, ...] = (),
    skew: float = 1.0,
) -> DecodeStep:
    """The decode step of one engine (tp x pp devices). `skew`: rows of the busiest expert rank over the mean.

    An expert-parallel group may span engines, whose requests then meet in its experts.
    """
    check_layout(model, layout)
    if list(buckets) != sorted(set(buckets)) or (buckets and buckets[0] < 1):
        raise WorkloadError("graph buckets are ascending batch sizes of at least 1")
    knobs, constants = machine.calibration.knobs, machine.calibration.constants
    rate = machine.memory_bytes_per_s * knobs.decode_memory
    flops = machine.flop_per_s * constants.prefill_flops
    stages = layers_of(model, layout)
    dense = expert = 0
    for stage in stages:
        part = shard(model, layout, stage)
        # The input embedding is gathered, a few rows of it; where it is also the head it is read.
        gathered = part.embeddings if stage.first and not (stage.last and model.tied) else 0
        if stage.first and stage.last and not model.tied:
            gathered //= 2
        dense, expert = max(dense, part.dense - gathered), max(expert, part.expert)
    layers = max(stage.layers for stage in stages)
    devices = layout.tp * layout.pp
    # A pipeline advances every request by one token in the time of `pp` stages.
    attention = layers * layout.pp * (decode_attention(model, 1.0) - decode_attention(model, 0.0)) / devices / flops
    folding = model.layers * decode_attention(model, 0.0)
    reduce = Group(layout.tp)
    small = constants.small_all_reduce_inside_s
    if layout.tp > machine.host_devices:
        # The kernels of engines for small messages work inside one host, whatever network joins the hosts.
        small = constants.small_all_reduce_across_s
    row = model.hidden * precision.weights
    exchange, routed = Group(layout.ep, layout.etp), row * model.top_k * skew / layout.tp
    return DecodeStep(
        dense_read=layout.pp * dense * precision.weights / rate,
        expert_read=layout.pp * expert * precision.weights / rate,
        experts_hit=log1p(-model.top_k / model.experts) if model.experts > model.top_k else -1e9,
        tokens_per_request=layout.ep * layout.etp / layout.tp * skew,
        compute=(2.0 * decode_products(model) + folding) / devices / flops,
        kv_token=max(kv_bytes_per_token(model, layout, precision) / (rate * constants.kv_over_weights), attention),
        host=model.layers * knobs.host_layer_s + layout.pp * knobs.host_step_s,
        request=constants.request_s,
        reduce_latency=2 * model.layers * small if layout.tp > 1 else 0.0,
        reduce_request=2 * model.layers * _bytes_seconds(reduce, 2 * row, machine) / layout.pp,
        exchange_latency=2 * model.moe_layers * constants.expert_exchange_s if layout.ep > 1 else 0.0,
        exchange_request=2
        * model.moe_layers
        * _bytes_seconds(exchange, routed, machine)
        / layout.pp
        / constants.expert_exchange_share,
        boundary=(layout.pp - 1) * _hop(layout, machine),
        stages=layout.pp,
        buckets=buckets,
    )


def prefill_flops(model: Dimensions, tokens: float, squares: float, heads: float) -> float:
    """Of prompts with so many tokens and squares of lengths; the head works on the last token of each prompt only."""
    return forward(model, tokens, squares, "none") + 2.0 * model.embedding * heads


def _bytes_seconds(group: Group, size: float, machine: Machine) -> float:
    """Bandwidth part of moving `size` bytes a device within a group: latencies are counted apart."""
    if group.size <= 1:
        return 0.0
    levels = group.levels(machine)
    return (group.size - 1) / group.size * size / min(link.bytes_per_s for _, link in levels)


def _hop(layout: Layout, machine: Machine) -> float:
    if layout.pp <= 1:
        return 0.0
    # An engine's stages are neighbours.
    inside = Group(layout.pp, layout.tp).all_inside(machine)
    return (machine.link_inside() if inside else machine.link_across()).latency_s


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafted tokens that the model verifies in one step, by a small model or by multi-token prediction."""

    drafted: int
    acceptance: float
    """Probability that a drafted token is accepted, given those before it were, in [0, 1)."""
    draft_cost: float
    """Of drafting one token, over a decode step."""
    verify_growth: float
    """What verifying `drafted` tokens adds to a step, over the step. It is what keeps the gain below the accepted
    length: measure it."""

    def __post_init__(self) -> None:
        if self.drafted < 0 or not 0 <= self.acceptance < 1 or min(self.draft_cost, self.verify_growth) < 0:
            raise WorkloadError("speculation needs acceptance in [0, 1) and costs of at least 0")

    @property
    def accepted(self) -> float:
        """Expected tokens of a step, the model's own included: (1 - a^(k+1))/(1 - a) (Leviathan et al. 2023)."""
        return (1 - self.acceptance ** (self.drafted + 1)) / (1 - self.acceptance)

    @property
    def speed_up(self) -> float:
        return self.accepted / (1 + self.drafted * self.draft_cost + self.verify_growth)
