"""FLOPs against sums written out by hand, and against properties of attention."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.cluster.presets.architecture import architecture
from rlflow.cost import flops
from rlflow.cost.dimensions import dimensions

quick = settings(max_examples=40, derandomize=True, deadline=None)


def test_qwen3_8b_by_hand(model):
    qwen = model("qwen3_8b")
    layer = 4096 * 128 * (32 + 2 * 8) + 32 * 128 * 4096 + 3 * 4096 * 12288
    n_lin = 36 * layer + 151936 * 4096
    assert flops.products(qwen) == n_lin
    assert flops.forward(qwen, 1000, 0) == 2 * n_lin * 1000
    assert flops.training(qwen, 1000, 0) == 6 * n_lin * 1000
    assert flops.training(qwen, 1000, 0, "full") == 6 * n_lin * 1000 + 2 * 36 * layer * 1000


def test_moe_counts_active_experts(model):
    qwen = model("qwen3_235b_a22b")
    layer = 4096 * 128 * (64 + 2 * 4) + 64 * 128 * 4096 + 4096 * 128 + 8 * 3 * 4096 * 1536
    assert flops.products(qwen) == 94 * layer + 151936 * 4096


def test_latent_attention_by_hand(model):
    deepseek = model("deepseek_v3_671b")
    h, n = 7168, 128
    attention = h * 1536 + n * 192 * 1536 + h * (512 + 64) + n * (192 - 64 + 128) * 512 + n * 128 * h
    moe = h * 256 + 3 * h * 2048 * (8 + 1)
    assert flops.products(deepseek) == 61 * attention + 3 * 3 * h * 18432 + 58 * moe + 129280 * h
    # verl's flops_counter: 3 L n (d_qk + d_v) sum s^2 forward and backward.
    assert flops.training(deepseek, 0, 10**6) == 3 * 61 * n * (192 + 128) * 10**6
    assert flops.decode_attention(deepseek, 1000) == 2 * n * 1000 * (2 * 512 + 64) + 2 * n * 512 * (128 + 128)


def test_attention_of_grouped_queries(model):
    """2 n_q d L sum s^2 forward, 6 forward and backward; selective recompute adds one forward."""
    qwen = model("qwen3_8b")
    once = 2 * 32 * 128 * 36 * 5e6
    assert flops.attention_forward(qwen, 5e6) == once
    assert flops.training(qwen, 0, 5e6) == 3 * once
    assert flops.training(qwen, 0, 5e6, "selective") == 4 * once


def test_value_models_have_no_vocabulary(model):
    qwen = model("qwen3_8b")
    assert flops.products(qwen) - flops.products(qwen, "scalar") == 151936 * 4096 - 4096


@pytest.mark.parametrize("name", ["qwen3_8b", "deepseek_v3_671b", "qwen3_30b_a3b"])
def test_decoding_a_sequence_costs_what_a_forward_pass_does(model, name):
    """Token by token with the cache: the same products, and causal attention as the sum over contexts. Latent attention
    decodes in another way, so only its products outside of attention are the same."""
    dims, length = model(name), 4000
    decoded = sum(flops.decode(dims, context) for context in range(length))
    forward = flops.forward(dims, length, length**2)
    if dims.is_latent:
        assert decoded > forward
    else:
        assert decoded == pytest.approx(forward, rel=1e-3)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20))
@quick
def test_equal_lengths_cost_the_least(lengths):
    dims = dimensions(architecture("qwen3_8b"))
    mean = sum(lengths) / len(lengths)
    true = flops.forward(dims, sum(lengths), sum(x * x for x in lengths))
    assert true >= flops.forward(dims, sum(lengths), len(lengths) * mean * mean) * (1 - 1e-12)


def test_utilisation():
    """C1: 6 x 36.6e9 x 13.55e6 tokens in 319.3 s on 256 dies of 376 TFLOP/s are about a tenth of peak."""
    assert flops.utilisation(6 * 36.6e9 * 13.55e6, 319.3, 256, 376e12) == pytest.approx(0.097, abs=0.001)
