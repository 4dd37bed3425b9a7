"""Adapters are divided so that every rank can add its part: B_local A_local is the local part of B A."""

from __future__ import annotations

import numpy as np
import pytest

from rlflow.cluster import presets
from rlflow.cluster.presets.architecture import Architecture
from rlflow.ir.flow import Layout
from rlflow.ir.ops import Lora
from rlflow.reshard.adapters import adapted, adapters_of
from rlflow.reshard.catalogue import Catalogue, Rule, TensorSpec, catalogue
from rlflow.reshard.execute import cut
from rlflow.reshard.shards import Sharding

RANK = 3


def lora(targets="all_linear"):
    return Lora(rank=RANK, alpha=6, targets=targets)


def layer():
    """4 query and 2 key-value heads of 4, a row-parallel output, a replicated projection, an expert stack, a norm."""
    at = "model.layers.0."
    return Catalogue(
        (
            TensorSpec("model.embed_tokens.weight", (32, 8), Rule.VOCAB, units=32),
            TensorSpec(at + "self_attn.q_proj.weight", (16, 8), Rule.SHARD, 0, 4, layer=0, fused="qkv"),
            TensorSpec(at + "self_attn.k_proj.weight", (8, 8), Rule.KV, 0, 2, layer=0, fused="qkv"),
            TensorSpec(at + "self_attn.o_proj.weight", (8, 16), Rule.SHARD, 1, 4, layer=0),
            TensorSpec(at + "self_attn.down.weight", (4, 8), Rule.REPLICATE, layer=0),
            TensorSpec(at + "mlp.experts.up_proj.weight", (4, 16, 8), Rule.EXPERT, 1, 16, layer=0),
            TensorSpec(at + "norm.weight", (8,), layer=0),
        ),
        1,
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_adds_its_part_without_asking_others(tp):
    tensors = layer()
    layout = Layout(dp=2, tp=tp)
    whole, small = adapted(tensors, lora()), adapters_of(tensors, lora())
    random = np.random.default_rng(0)
    parts = {spec.name: random.integers(-3, 4, spec.shape).astype(np.int64) for spec in small}
    sums = {}
    for spec in whole:
        name = spec.name.removesuffix(".weight")
        sums[spec.name] = parts[f"{name}.lora_B.weight"] @ parts[f"{name}.lora_A.weight"]
    for rank in range(layout.size):
        mine = cut(Sharding(small, layout), parts, rank)
        wanted = cut(Sharding(whole, layout), sums, rank)
        assert wanted.keys() == sums.keys()
        for full, value in wanted.items():
            name = full.removesuffix(".weight")
            np.testing.assert_array_equal(mine[f"{name}.lora_B.weight"] @ mine[f"{name}.lora_A.weight"], value)


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ("all_linear", ["q_proj", "k_proj", "o_proj", "down"]),
        ("attention", ["q_proj", "k_proj", "o_proj", "down"]),
        (("q_proj",), ["q_proj"]),
        (("layers.0.self_attn.k_proj", "o_proj"), ["k_proj", "o_proj"]),
        (("proj",), []),
    ],
)
def test_targets(targets, layers):
    found = [spec.name.split(".")[-2] for spec in adapted(layer(), lora(targets))]
    assert found == layers


def test_the_sizes_of_a_published_model():
    """Rank 16 on all linear layers of Qwen3-8B, by hand: a layer has q, o 4096 <-> 4096, k and v 4096 -> 1024, gate
    and up 4096 -> 12288, down 12288 -> 4096; 36 of them."""
    tensors = catalogue(Architecture("qwen3_8b", presets.model("qwen3_8b")), mtp=False)
    found = adapters_of(tensors, Lora(rank=16, alpha=32, targets="all_linear"))
    assert found.elements == 36 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
