"""Bytes on a device against published tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.cluster.presets.architecture import architecture
from rlflow.cost.activations import expert_row, layer_activations, moe_rows
from rlflow.cost.components import FULL, Precision
from rlflow.cost.dimensions import dimensions
from rlflow.cost.kv_cache import kv_bytes_per_token, kv_pool
from rlflow.cost.memory import Batch, forward_memory, train_memory, train_stage_memory
from rlflow.cost.shards import attention_parameters, expert_parameters, layers_of, shard
from rlflow.ir.flow import Layout

GIB = 2**30
MIB = 2**20
quick = settings(max_examples=30, derandomize=True, deadline=None)


# --- Qwen3-235B-A22B: cann-recipes-train ------------------------------------------------------------------------------


def test_weights_of_a_rollout_die(model):
    """tp4 dp32 ep128, bf16: 7.09 GiB a die, by part."""
    qwen, layout = model("qwen3_235b_a22b"), Layout(dp=32, tp=4, ep=128)
    part = shard(qwen, layout, layers_of(qwen, layout)[0])
    qkv = 94 * 4096 * (64 * 128 // 4 + 2 * 128)
    output = 94 * 64 * 128 * 4096 // 4
    assert 2 * part.total / GIB == pytest.approx(7.09, abs=0.01)  # the sum of the rounded parts
    assert round(2 * part.embeddings / GIB, 2) == 0.58
    assert round(2 * qkv / GIB, 2) == 1.65
    assert round(2 * output / GIB, 2) == 1.47
    assert round(2 * part.expert / GIB, 2) == 3.30
    assert round(2 * 94 * 4096 * 128 / GIB, 2) == 0.09
    norms = 94 * (2 * 4096 + 2 * 128) + 4096
    assert part.total == qkv + output + part.embeddings + part.expert + 94 * 4096 * 128 + norms


def test_cache_of_a_sequence(model):
    """tp4: 1.47 GiB for 32,768 tokens on a die; more ranks than heads copy them."""
    qwen = model("qwen3_235b_a22b")
    assert round(32768 * kv_bytes_per_token(qwen, Layout(tp=4)) / GIB, 2) == 1.47
    assert kv_bytes_per_token(qwen, Layout(tp=8)) == kv_bytes_per_token(qwen, Layout(tp=4))
    assert kv_bytes_per_token(qwen, Layout(tp=2)) == 2 * kv_bytes_per_token(qwen, Layout(tp=4))
    assert kv_bytes_per_token(qwen, Layout(tp=1)) == architecture("qwen3_235b_a22b").kv_bytes_per_token()


def test_latent_cache_is_not_split(model):
    deepseek = model("deepseek_v3_671b")
    for tp in (1, 2, 8):
        assert kv_bytes_per_token(deepseek, Layout(tp=tp)) == 70_272


def test_training_layers_of_a_die(model):
    """tp4 pp4 ep32: 18 + 16 + 4 x 36 MiB a layer; 24 layers are 4.17 GiB of weights and 8.34 of gradients."""
    qwen, layout = model("qwen3_235b_a22b"), Layout(dp=2, cp=4, tp=4, pp=4, ep=32, split=(24, 24, 23, 23))
    attention = 2 * (attention_parameters(qwen, 4) - 2 * 128) / MIB
    assert attention == 18 + 16
    assert 2 * expert_parameters(qwen, layout) / MIB == 4 * 36
    layer = attention + 4 * 36
    assert round(24 * layer / 1024, 2) == 4.17
    assert round(24 * 2 * layer / 1024, 2) == 8.34
    held = train_stage_memory(qwen, layout, Batch(1, 1), 1)
    assert held.weights == pytest.approx(24 * layer * MIB, rel=0.01)  # and the router
    assert held.gradients == 2 * held.weights


def test_activations_of_experts(model):
    """tp4 cp4 ep32, 32K tokens: 352 MiB a layer when balanced, 5,152 with every token on one die."""
    qwen, layout = model("qwen3_235b_a22b"), Layout(dp=2, cp=4, tp=4, pp=4, ep=32, sp=True, split=(24, 24, 23, 23))
    tokens = 32768 / 4 / 4
    around = 2 * 2 * tokens * 4096  # the inputs of norm and feed-forward part
    balanced, all_here = (rows * expert_row(qwen, layout) for rows in moe_rows(qwen, layout, tokens))
    assert (around + balanced) / MIB == 352
    assert (around + all_here) / MIB == 5152


# --- Megatron-LM, arXiv 2205.05198 ------------------------------------------------------------------------------------

MEGATRON = [
    # hidden, layers, heads, layout, sequences, micro-batches: params + optimizer, activations, with selective + sp
    (6144, 48, 64, Layout(tp=8), 4, 1, 45.56, 59.25, 9.56),
    (20480, 105, 128, Layout(tp=8, pp=35, vp=3), 1, 280, 31.64, 114.02, 23.08),
]


@pytest.mark.parametrize(("h", "l", "n", "layout", "b", "m", "states", "kept", "selective"), MEGATRON)
def test_megatron_rows(plain_gpt, h, l, n, layout, b, m, states, kept, selective):  # noqa: E741
    gpt, batch = plain_gpt(h, l, n), Batch(b * 2048, 2048, m)
    first = train_stage_memory(gpt, layout, batch, 0, flash=False)
    assert round(first.activations / GIB, 2) == kept
    leaner = replace(layout, sp=True, recompute="selective")
    assert round(train_stage_memory(gpt, leaner, batch, 0, flash=False).activations / GIB, 2) == selective
    middle = layout.pp // 2
    held = train_stage_memory(gpt, layout, batch, middle, flash=False)
    embeddings = 18 * shard(gpt, layout, layers_of(gpt, layout)[middle]).embeddings
    assert (held.resident - embeddings) / GIB == pytest.approx(states, rel=5e-4)  # norms are counted here


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("sp", [False, True])
def test_closed_forms_of_a_plain_layer(plain_gpt, t, sp):
    """s b h (10 + 24/t + 5 n s/(h t)); with sequence parallelism (34 + 5 n s/h)/t; full recompute keeps 2."""
    gpt, h, n, s = plain_gpt(1024, 2, 16), 1024, 16, 512
    each = layer_activations(gpt, Layout(tp=t, sp=sp), flash=False)
    expected = h * 34 / t if sp else h * (10 + 24 / t)
    assert each.dense == pytest.approx(expected)
    assert each.scores * s == pytest.approx(5 * n * s / t)
    assert each.input == (2 * h / t if sp else 2 * h)


# --- roles and shards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "expected"),
    [(0, 2 + 4 + 12), (1, 2 + 4 + 12 / 8), (2, 2 + (4 + 12) / 8), (3, (2 + 4 + 12) / 8)],
)
def test_zero_divides_states(model, zero, expected):
    """Bytes a parameter of a dense model: 6 + 12/D is Megatron's distributed optimizer, 18/D is FSDP."""
    qwen = model("qwen3_8b")
    held = train_memory(qwen, Layout(dp=8, zero=zero), Batch(4096, 4096))
    assert held.resident == pytest.approx(expected * architecture("qwen3_8b").params(), rel=1e-6)


def test_experts_are_sharded_over_their_own_replicas(model):
    """D_e = t c D/(e e_tp): 8 x 4/8 = 4 copies of an expert, 8 of the rest."""
    qwen, layout = model("qwen3_30b_a3b"), Layout(dp=8, tp=4, ep=8, zero=1)
    part = shard(qwen, layout, layers_of(qwen, layout)[0])
    held = train_memory(qwen, layout, Batch(4096, 4096))
    assert held.optimizer == 12 * (-(-part.dense // 8) + part.expert // 4)
    assert layout.expert_replicas == 4


def test_precisions(model):
    qwen = model("qwen3_8b")
    params = architecture("qwen3_8b").params()
    assert train_memory(qwen, Layout(), Batch(1, 1), precision=FULL).resident == 16 * params
    assert train_memory(qwen, Layout(), Batch(1, 1), precision=Precision(2, 2, 16)).resident == 20 * params


def test_passes_without_gradients_hold_weights_and_a_layer(model):
    qwen = model("qwen3_8b")
    held = forward_memory(qwen, Layout(tp=2), Batch(8192, 4096))
    trained = train_memory(qwen, Layout(tp=2), Batch(8192, 4096))
    assert held.weights == trained.weights
    assert held.gradients == held.optimizer == held.activations == 0
    assert held.logits == 8192 * 151936 // 2 * 4
    assert trained.logits == 8192 * 151936 // 2 * 6
    assert forward_memory(qwen, Layout(tp=2), Batch(8192, 4096), head="scalar").logits == 0
    assert 0 < held.working < trained.activations


def test_tied_embeddings_are_copied_to_the_last_stage(plain_gpt):
    gpt = plain_gpt(1024, 4, 16)
    embedding = 51200 * 1024
    assert [shard(gpt, Layout(pp=2), stage).embeddings for stage in layers_of(gpt, Layout(pp=2))] == [embedding] * 2
    assert shard(gpt, Layout(), layers_of(gpt, Layout())[0]).embeddings == embedding


def test_pool_of_keys_and_values(model):
    """9/10 of what is left of the engine's share, in tokens; nothing left is 0, not negative."""
    qwen, layout = model("qwen3_8b"), Layout(tp=2)
    pool = kv_pool(qwen, layout, 64_000_000_000, 10_000_000_000, share=0.9)
    assert pool.bytes_per_token == 147_456 // 2
    assert pool.tokens == (57_600_000_000 - 10_000_000_000) * 9 // 10 // 73_728
    assert pool.sequences(40960) == pool.tokens // 40960
    assert kv_pool(qwen, layout, 10, 20).tokens == 0


LAYOUTS = st.builds(
    lambda dp, tp, pp, zero, sp, recompute: Layout(dp=dp, tp=tp, pp=pp, zero=zero, sp=sp, recompute=recompute),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from(["none", "selective", "full"]),
)


@given(LAYOUTS, st.sampled_from(["qwen3_8b", "qwen3_30b_a3b"]), st.integers(1, 8))
@quick
def test_sharding_more_never_needs_more(layout, name, microbatches):
    qwen, batch = dimensions(architecture(name)), Batch(8192, 2048, microbatches)
    finer = (
        replace(layout, tp=2 * layout.tp),
        replace(layout, zero=layout.zero + 1),
        replace(layout, dp=2 * layout.dp),
    )
    for stage in range(layout.pp):
        held = train_stage_memory(qwen, layout, batch, stage)
        assert held.total == sum(held.named().values())
        for other in finer:
            there = train_stage_memory(qwen, other, batch, stage)
            assert there.resident <= held.resident
            assert there.activations <= held.activations
            assert there.logits <= held.logits
            assert other.zero == 3 or there.total <= held.total  # FSDP gathers layers beside its shards
        full = train_stage_memory(qwen, replace(layout, recompute="full"), batch, stage)
        assert full.activations <= held.activations
    if qwen.layers % (2 * layout.pp) == 0:
        assert (
            train_memory(qwen, replace(layout, pp=2 * layout.pp), batch).resident
            < train_memory(qwen, layout, batch).resident
        )


@given(LAYOUTS, st.integers(1, 12))
@quick
def test_the_fullest_stage_is_found(layout, microbatches):
    """Only one stage of each kind is looked at: that must be the maximum over all."""
    for name, split in (
        ("qwen3_8b", ()),
        ("deepseek_v3_671b", {1: (61,), 2: (29, 32), 4: (15, 15, 15, 16)}[layout.pp]),
    ):
        model, here = dimensions(architecture(name)), replace(layout, split=split)
        batch = Batch(4096, 2048, microbatches)
        stages = [train_stage_memory(model, here, batch, stage).total for stage in range(layout.pp)]
        assert train_memory(model, here, batch).total == max(stages)
