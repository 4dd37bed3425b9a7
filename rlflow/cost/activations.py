"""What the forward pass of training keeps for the backward pass, in bytes on one device.

Counted tensor by tensor in 16 bits, after Korthikanti et al. 2022 (arXiv 2205.05198), whose closed forms for a plain
transformer (f = 4h, all heads with their own keys, dropout) this gives exactly: 34 s b h and 5 n_q s^2 b a layer. Gated
feed-forward parts, grouped keys, latent attention and experts follow by the same rule. The log-sum-exp of flash
attention (four bytes a head and token) is left out, as in the paper.
"""

from __future__ import annotations

from rlflow.cost.dimensions import Dimensions
from rlflow.ir.flow import Layout
from rlflow.values import dataclass

BYTES = 2
"""Of one activation."""


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes that one layer keeps for one token of a device; `scores` also for every token of its sequence."""

    dense: float
    moe: float
    """Of a mixture-of-experts layer with every token at `top_k` experts, evenly spread."""
    expert_row: float
    """Of one row of an expert: a token counts once for each expert that it is sent to."""
    input: float
    """The input of a layer alone, which is what full recomputation keeps."""
    scores: float


def layer_activations(model: Dimensions, layout: Layout, *, flash: bool = True, skew: float = 1.0) -> LayerActivations:
    """Nothing recomputed. `skew` >= 1: rows on the busiest expert-parallel rank over the mean."""
    t, h = layout.tp, model.hidden
    whole = t if layout.sp else 1  # what tensor parallelism alone leaves whole on every rank
    norms = BYTES * model.norms * h
    inputs = 2 * BYTES * h  # of the attention's and the feed-forward part's projections
    masks = 2 * h if model.dropout else 0
    ffn = (norms + inputs + masks) / whole
    attention = _attention(model, t)
    inner = model.ffn_matrices * BYTES
    row = expert_row(model, layout)
    # dp x cp x tokens x k rows over ep x etp x replicas = dp x cp x tp devices, each with 1/etp of its experts.
    rows = model.top_k * skew * layout.etp / t
    return LayerActivations(
        dense=ffn + attention + inner * model.ffn / t,
        moe=ffn + attention + inner * model.shared_ffn / t + rows * row,
        expert_row=row,
        input=BYTES * h / whole,
        scores=0.0 if flash else (5 if model.dropout else 2) * model.heads / t,
    )


def expert_row(model: Dimensions, layout: Layout) -> float:
    """Input, gate, up, their product, and that product weighted by the router: h + 4f for gated experts.

    The output needs not be kept, since the router's weight is applied before the last product.
    """
    return BYTES * (model.hidden + (model.ffn_matrices + 1) * model.expert_ffn / layout.etp)


def moe_rows(model: Dimensions, layout: Layout, tokens: float) -> tuple[float, float]:
    """Rows of one device's experts for `tokens` a device: evenly spread, and with every token on this device.

    A token goes to `top_k` different experts, so at most to as many here as the device has.
    """
    here = min(model.top_k, -(-model.experts // layout.ep))
    return tokens * model.top_k, tokens * layout.ep * here


def _attention(model: Dimensions, t: int) -> float:
    """Queries, keys, values and the output of attention, and what comes before them."""
    queries, values = model.query_width, model.output_width
    if not model.is_latent:
        # Beyond as many ranks as key-value heads every rank keeps a copy of one.
        kv = max(model.key_width + model.value_width, (model.key_size + model.value_size) * t)
        normed = queries + max(model.key_width, model.key_size * t) if model.qk_norm else 0
        return BYTES * (queries + kv + values + normed) / t
    latent = 2 * (model.latent_q + model.latent_kv) + model.rope_size  # before and after their norms
    return BYTES * (latent + (queries + model.key_width + model.value_width + values) / t)
