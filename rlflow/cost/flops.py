"""FLOPs of a model's passes: two for every product of a weight and a value, attention by the squares of lengths.

The rules are those of verl's `flops_counter` for causal attention on packed sequences (half of the full square is
computed), with the backward pass at twice the forward pass. Embeddings are gathered, which costs no FLOPs; norms,
biases and rotary embeddings are left out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from rlflow.cost.dimensions import Dimensions

Recompute = Literal["none", "selective", "full"]
Head = Literal["vocabulary", "scalar", "none"]
"""What stands after the last layer: a token distribution, one value (reward and value models), nothing."""


def dense_layer_products(model: Dimensions) -> int:
    """Weights that every token meets in a layer that is not split into experts."""
    return model.attention_matrices + model.dense_ffn


def moe_layer_products(model: Dimensions) -> int:
    """Weights that one token meets in a mixture-of-experts layer: router, its experts and the shared ones."""
    return model.attention_matrices + model.router + model.top_k * model.expert + model.shared_expert


def head_products(model: Dimensions, head: Head = "vocabulary") -> int:
    return {"vocabulary": model.embedding, "scalar": model.hidden, "none": 0}[head]


def products(model: Dimensions, head: Head = "vocabulary") -> int:
    """Weights that one token meets: N_lin, the active parameters without the input embedding."""
    dense = model.dense_layers * dense_layer_products(model) if model.dense_layers else 0
    moe = model.moe_layers * moe_layer_products(model) if model.moe_layers else 0
    return dense + moe + head_products(model, head)


def attention_forward(model: Dimensions, sum_of_squares: float, layers: int | None = None) -> float:
    """Causal attention of packed sequences, forward: n_q (d_qk + d_v) L sum(s_i^2).

    `sum_of_squares` is over the lengths in tokens; the square of the mean length would be too small.
    """
    heads = model.heads * (model.key_size + model.value_size)
    return float(heads * (model.layers if layers is None else layers) * sum_of_squares)


@lru_cache(maxsize=256)
def attention_share(model: Dimensions) -> float:
    """Attention of s tokens over their products, divided by s: the cost of a sequence is as s + share s^2."""
    return attention_forward(model, 1.0) / (2.0 * products(model))


def forward(model: Dimensions, tokens: float, sum_of_squares: float, head: Head = "vocabulary") -> float:
    """One forward pass, as of log-probabilities, values or a reward model."""
    return 2.0 * products(model, head) * tokens + attention_forward(model, sum_of_squares)


def training(
    model: Dimensions,
    tokens: float,
    sum_of_squares: float,
    recompute: Recompute = "none",
    head: Head = "vocabulary",
) -> float:
    """Forward and backward; `full` recomputes every layer but not the head, `selective` the attention."""
    once = forward(model, tokens, sum_of_squares, head)
    again = 0.0
    if recompute == "full":
        again = forward(model, tokens, sum_of_squares, "none")
    elif recompute == "selective":
        again = attention_forward(model, sum_of_squares)
    return 3.0 * once + again


def decode_attention(model: Dimensions, context: float) -> float:
    """Attention of one new token over `context` cached ones, of one layer.

    Latent attention keeps the compressed form and folds the up-projections into queries and outputs ("absorbed
    weights", DeepSeek-V2, arXiv 2405.04434): 2 n_q ctx (2 r_kv + d_rope), and the folding 2 n_q r_kv (d_nope + d_v).
    """
    if not model.is_latent:
        return 2.0 * model.heads * (model.key_size + model.value_size) * context
    over = 2.0 * model.heads * context * (2 * model.latent_kv + model.rope_size)
    folding = 2.0 * model.heads * model.latent_kv * (model.key_size - model.rope_size + model.value_size)
    return over + folding


def decode_products(model: Dimensions) -> int:
    """Weights that one new token meets, without the up-projections that `decode_attention` counts as folding."""
    if not model.is_latent:
        return products(model)
    up = model.heads * model.latent_kv * (model.key_size - model.rope_size + model.value_size)
    return products(model) - model.layers * up


def decode(model: Dimensions, context: float) -> float:
    """One new token with `context` tokens before it, all layers and the head."""
    return 2.0 * decode_products(model) + model.layers * decode_attention(model, context)


def utilisation(flops: float, seconds: float, devices: int, peak_flop_per_s: float) -> float:
    """Model FLOPs utilisation: the share of peak that `flops` in `seconds` are."""
    return flops / (seconds * devices * peak_flop_per_s)
