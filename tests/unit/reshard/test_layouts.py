"""Sharding rules on numbers that users met, and every clash in one error."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from rlflow.cluster.presets.architecture import Architecture, architecture
from rlflow.cluster.spec import Cluster, Host
from rlflow.ir.flow import Layout
from rlflow.reshard.catalogue import EMBEDDING, HEAD, Catalogue, Home, Rule, TensorSpec, catalogue
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.execute import cut, execute
from rlflow.reshard.names import check_ranks
from rlflow.reshard.plan import plan_reshard
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import Storage


def embedding(vocabulary, hidden=2):
    return Catalogue((TensorSpec(EMBEDDING, (vocabulary, hidden), Rule.VOCAB, 0, vocabulary, Home.EMBEDDING),), 1)


def rows_of(vocabulary, multiple, tp):
    sharding = Sharding(embedding(vocabulary), Layout(tp=tp), Storage(vocabulary_multiple=multiple))
    return [sharding.shard(rank, EMBEDDING).shape[0] for rank in range(tp)]


def test_padding_of_the_vocabulary_is_not_multiplied_by_tp():
    assert rows_of(151_936, 1, 2) == [75_968, 75_968]
    assert rows_of(151_936, 256, 2) == [76_032, 76_032]
    assert rows_of(32_008, 64, 2) == [16_032, 16_032]


def test_padding_rows_are_in_no_piece_and_both_sides_of_an_edge_agree():
    tensors = embedding(32_008)
    storage = Storage(vocabulary_multiple=64)
    sharding = Sharding(tensors, Layout(tp=2), storage)
    assert [p.box[0] for r in (0, 1) for p in sharding.pieces(r, EMBEDDING)] == [(0, 16_032), (16_032, 32_008)]
    fabric = Fabric.uniform(4, 4, 1e9, 1e9)
    plan = plan_reshard(
        tensors, Endpoint(Layout(tp=2), (0, 1), storage), Endpoint(Layout(tp=2), (2, 3), storage), fabric
    )
    assert plan.received_bytes == 32_008 * 2 * 2


def test_an_uncut_vocabulary_is_refused():
    with pytest.raises(ReshardError, match=r"tp 3 does not divide the 32008 rows"):
        rows_of(32_008, 1, 3)


# --- key-value heads -------------------------------------------------------------------------------------------------


def heads(queries, kv, dim=2):
    def spec(name, count, rule):
        return TensorSpec(
            f"model.layers.0.self_attn.{name}.weight", (count * dim, 1), rule, 0, count, layer=0, fused="qkv"
        )

    q, k, v = spec("q_proj", queries, Rule.SHARD), spec("k_proj", kv, Rule.KV), spec("v_proj", kv, Rule.KV)
    return Catalogue((q, k, v), 1)


def labelled(queries, kv, dim=2):
    """Rows named q0, k0, ... ; a head has `dim` rows."""
    return {
        f"model.layers.0.self_attn.{part}_proj.weight": np.array([[f"{part}{h}"] for h in range(n) for _ in range(dim)])
        for part, n in (("q", queries), ("k", kv), ("v", kv))
    }


def order(array):
    return " ".join(dict.fromkeys(array[:, 0].tolist()))


def test_more_ranks_than_kv_heads_replicate_them():
    sharding = Sharding(heads(8, 4), Layout(tp=8))
    name = "model.layers.0.self_attn.k_proj.weight"
    assert [sharding.pieces(rank, name)[0].box[0] for rank in range(8)] == [
        (2 * h, 2 * h + 2) for h in (0, 0, 1, 1, 2, 2, 3, 3)
    ]
    assert [ranks for _, ranks in sharding.groups(name)] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_neither_divides_the_other():
    with pytest.raises(ReshardError) as caught:
        Sharding(heads(24, 4), Layout(tp=6))
    assert "neither of tp 6 and 4 key-value heads divides the other" in str(caught.value)


@pytest.mark.parametrize(
    ("queries", "kv", "tp", "expected"),
    [
        (4, 2, 1, ["q0 q1 k0 v0 q2 q3 k1 v1"]),
        (4, 2, 2, ["q0 q1 k0 v0", "q2 q3 k1 v1"]),
        (4, 2, 4, ["q0 k0 v0", "q1 k0 v0", "q2 k1 v1", "q3 k1 v1"]),
        (16, 8, 4, [" ".join(f"q{2 * g} q{2 * g + 1} k{g} v{g}" for g in (2 * r, 2 * r + 1)) for r in range(4)]),
    ],
)
def test_grouped_qkv_is_interleaved_per_kv_head(queries, kv, tp, expected):
    tensors, arrays = heads(queries, kv), labelled(queries, kv)
    grouped = Sharding(tensors, Layout(tp=tp), Storage(qkv="grouped"))
    local = "model.layers.0.self_attn.qkv_proj.weight"
    assert [order(cut(grouped, arrays, rank)[local]) for rank in range(tp)] == expected
    stacked = Sharding(tensors, Layout(), Storage(qkv="stacked"))
    assert order(cut(stacked, arrays, 0)[local]) == " ".join(
        f"{p}{h}" for p, n in (("q", queries), ("k", kv), ("v", kv)) for h in range(n)
    )


@pytest.mark.parametrize(("queries", "kv"), [(4, 2), (16, 8)])
def test_to_grouped_and_back_is_the_identity(queries, kv):
    tensors, arrays = heads(queries, kv), labelled(queries, kv)
    fabric = Fabric.uniform(2, 2, 1e9, 1e9)
    plain, grouped = Endpoint(Layout(tp=2), (0, 1)), Endpoint(Layout(tp=2), (0, 1), Storage(qkv="grouped"))
    there, back = plan_reshard(tensors, plain, grouped, fabric), plan_reshard(tensors, grouped, plain, fabric)
    assert there.received_bytes == back.received_bytes == 0
    before = {r: cut(Sharding(tensors, Layout(tp=2)), arrays, r) for r in range(2)}
    after = execute(back, execute(there, before))
    for rank in range(2):
        for name, value in before[rank].items():
            assert after[rank][name].tolist() == value.tolist()


# --- pipeline stages -------------------------------------------------------------------------------------------------


def test_layers_keep_their_global_names():
    """48 layers on two stages: global layer 30 is local layer 6 of stage 1, and every name comes from one stage."""
    tensors = catalogue(architecture("qwen3_30b_a3b"))
    sharding = Sharding(tensors, Layout(pp=2))
    name = "model.layers.{}.mlp.gate.weight"
    assert [sharding.stages(tensors[name.format(i)]) for i in (0, 23, 24, 30, 47)] == [(0,), (0,), (1,), (1,), (1,)]
    second = [n for n in sharding.local_tensors(1) if n.endswith("mlp.gate.weight")]
    assert second.index(name.format(30)) == 6
    names = [n for rank in (0, 1) for n in sharding.local_tensors(rank)]
    assert len(names) == len(set(names)) == len(tensors.tensors)


def test_stages_that_count_their_layers_from_0_are_found_out():
    """Both stages publish layers 0..23: half of the names are wrong, and the other half is missing."""
    tensors = catalogue(architecture("qwen3_30b_a3b"))
    sharding = Sharding(tensors, Layout(pp=2))
    right = {rank: list(sharding.local_tensors(rank)) for rank in range(2)}
    check_ranks(sharding, right)
    local = [re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) - 24}", name) for name in right[1]]
    with pytest.raises(ReshardError) as caught:
        check_ranks(sharding, {0: right[0], 1: local})
    text = "model.layers.{}.self_attn.q_proj.weight"
    assert f"rank 1 gives {text.format(6)}, which pipeline stage 1 does not hold" in caught.value.problems
    assert f"rank 1 does not give {text.format(30)} of pipeline stage 1" in caught.value.problems
    layers = sum(name.startswith("model.layers.") for name in right[1])
    assert len(caught.value.problems) == 2 * layers
    with pytest.raises(ReshardError, match=r"rank 0 gives model\.embed_tokens\.weight more than once"):
        check_ranks(sharding, {0: [*right[0], EMBEDDING], 1: right[1]})


def test_interleaved_and_uneven_stages():
    tensors = catalogue(architecture("llama3_1_8b"))
    sharding = Sharding(tensors, Layout(pp=2, vp=2, split=(10, 6, 9, 7)))
    layers = [spec.layer for spec in tensors if spec.name.endswith("q_proj.weight") and sharding.stages(spec) == (0,)]
    assert layers == [*range(10), *range(16, 25)]


def test_a_tied_embedding_is_on_both_ends():
    facts = dict(architecture("qwen3_8b").facts) | {"tie_word_embeddings": True}
    tensors = catalogue(Architecture("tied", facts))
    sharding = Sharding(tensors, Layout(pp=3))
    assert sharding.stages(tensors[EMBEDDING]) == (0, 2)
    untied = catalogue(architecture("qwen3_8b"))
    assert Sharding(untied, Layout(pp=3)).stages(untied[EMBEDDING]) == (0,)
    assert Sharding(untied, Layout(pp=3)).stages(untied[HEAD]) == (2,)


def test_a_needed_module_that_the_source_lacks_is_an_error():
    tensors = catalogue(architecture("deepseek_v3_671b"))
    fabric = Fabric.uniform(2, 2, 1e9, 1e9)
    without = Endpoint(Layout(), (0,), Storage(mtp=False))
    with pytest.raises(ReshardError, match=r"layers\.61\.eh_proj\.weight: the source does not hold"):
        plan_reshard(tensors, without, Endpoint(Layout(), (1,)), fabric)
    plan = plan_reshard(tensors, Endpoint(Layout(), (1,)), without, fabric)
    assert plan.received_bytes == 2 * architecture("deepseek_v3_671b").params()


# --- experts ---------------------------------------------------------------------------------------------------------


def test_experts_have_a_mesh_of_their_own():
    tensors = catalogue(architecture("qwen3_30b_a3b"))
    sharding = Sharding(tensors, Layout(dp=4, tp=2, ep=2, etp=2))
    name = "model.layers.0.mlp.experts.down_proj.weight"
    # local rank = (x * ep + e) * etp + y
    assert [sharding.pieces(r, name)[0].box for r in range(8)] == [
        ((64 * e, 64 * e + 64), (0, 2048), (384 * y, 384 * y + 384)) for _ in (0, 1) for e in (0, 1) for y in (0, 1)
    ]


def test_slices_of_experts_are_not_sent_as_if_whole():
    """Expert tensor parallelism 2 of width 512 to a side that needs 512."""
    spec = TensorSpec("model.layers.0.mlp.experts.up_proj.weight", (4, 512, 3), Rule.EXPERT, 1, 512, layer=0)
    tensors = Catalogue((spec,), 1)
    fabric = Fabric.uniform(3, 3, 1e9, 1e9)
    plan = plan_reshard(tensors, Endpoint(Layout(tp=2, etp=2), (0, 1)), Endpoint(Layout(), (2,)), fabric)
    whole = np.arange(4 * 512 * 3).reshape(4, 512, 3)
    source = {r: cut(Sharding(tensors, Layout(tp=2, etp=2)), {spec.name: whole}, r) for r in range(2)}
    assert source[0][spec.name].shape == (4, 256, 3)
    assert execute(plan, source)[2][spec.name].tolist() == whole.tolist()


def test_all_clashes_are_listed_with_both_numbers():
    tensors = catalogue(architecture("qwen3_30b_a3b"))
    with pytest.raises(ReshardError) as caught:
        Sharding(tensors, Layout(dp=2, tp=3, pp=5, ep=5, etp=5))
    assert caught.value.problems == (
        "48 layers do not divide into pp 5 x vp 1 = 5 equal parts: state a split",
        "ep 5 x etp 5 = 25 does not divide the 6 devices of a pipeline stage (dp 2 x cp 1 x tp 3)",
        "tp 3 does not divide the 151936 rows of model.embed_tokens.weight: pad the vocabulary",
        "tp 3 does not divide the 32 units of self_attn.q_proj.weight",
        "self_attn.k_proj.weight: neither of tp 3 and 4 key-value heads divides the other",
        "tp 3 does not divide the 32 units of self_attn.o_proj.weight",
        "ep 5 does not divide the 128 experts of mlp.experts.gate_proj.weight",
        "etp 5 does not divide the width 768 of mlp.experts.gate_proj.weight",
        "ep 5 does not divide the 128 experts of mlp.experts.down_proj.weight",
        "etp 5 does not divide the width 768 of mlp.experts.down_proj.weight",
    )
    dense = catalogue(architecture("qwen3_8b"))
    for layout, words in [
        (Layout(ep=2), "the model has no experts"),
        (Layout(pp=2, split=(36,)), "split has 1 parts"),
        (Layout(pp=2, split=(30, 5)), "gives 35 layers, the model has 36"),
        (Layout(dp=0), "dp = 0 is not a size"),
    ]:
        with pytest.raises(ReshardError, match=words):
            Sharding(dense, layout)
    with pytest.raises(ReshardError, match="unknown element type bf16"):
        Sharding(dense, Layout(), Storage(dtype="bf16"))


def test_devices_that_do_not_suffice():
    """Training tp 1 dp 2, rollout tp 4 on the same devices: 2 < 4."""
    with pytest.raises(ReshardError, match="the layout has 4 ranks, 2 devices are given"):
        Endpoint(Layout(tp=4), (0, 1))
    with pytest.raises(ReshardError, match="more than once"):
        Endpoint(Layout(tp=2), (0, 0))
    fabric = Fabric.uniform(2, 2, 1e9, 1e9)
    with pytest.raises(ReshardError, match=r"devices \[2\] are not among the 2"):
        plan_reshard(embedding(8), Endpoint(Layout(), (0,)), Endpoint(Layout(), (2,)), fabric)


def test_the_links_of_a_cluster():
    """Two hosts of one supernode are one node; a CPU host has no facts."""
    die, cpu = Host("a", "ascend_910c_die", 2, supernode="s"), Host("b", "cpu", 3)
    fabric = Fabric.of_cluster(Cluster("c", (die, cpu, die)), 7.0)
    assert fabric.node_of == (0, 0, 1, 1, 1, 0, 0)
    assert fabric.device_bandwidth == (196e9, 196e9, 7.0, 7.0, 7.0, 196e9, 196e9)
    assert fabric.node_bandwidth == {0: 4 * 25e9, 1: 21.0}


def test_zero_below_3_keeps_weights_replicated():
    tensors = embedding(8)
    for zero in (0, 1, 2):
        sharding = Sharding(tensors, Layout(dp=2, cp=2, zero=zero))
        assert [sharding.bytes_of(r) for r in range(4)] == [32] * 4
    assert [Sharding(tensors, Layout(dp=2, cp=2, zero=3)).bytes_of(r) for r in range(4)] == [8] * 4
    assert Sharding(tensors, replace(Layout(dp=2, cp=2), zero=3)).pieces(3, EMBEDDING)[0].box == ((6, 8), (0, 2))
