"""Group A of the field reports, the part about layouts: heads, layers and experts against tp, cp, pp and ep."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow.ir.parser import parse_flow
from rlflow.ir.printer import print_flow

MOE = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 256,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
}


def on(devices: int, layout: str) -> str:
    return f"pool main = {devices} devices place actor on main with {layout}"


def test_A11_heads_and_experts_are_reported_together(place_: Any, hf_model: Any) -> None:
    """64 heads and 256 experts over tp 3 and ep 3: both in one run, each with what is legal."""
    model = hf_model(**MOE, num_attention_heads=64, num_key_value_heads=8, head_dim=64, intermediate_size=3072)
    result = place_(on(6, "tp = 3, ep = 3, etp = 1"), model=model, prompts=6)
    assert result.codes == ["RLF2001", "RLF2001"]
    assert "`tp = 3` does not divide the 64 attention heads of `actor`" in result.words
    assert "legal: tp 1, 2, 4, 8, 16, 32, 64" in result.words
    assert "`ep = 3` does not divide the 256 experts of `actor`" in result.words
    assert "legal: ep 1, 2, 4" in result.words, "divisors of 256 within the pool of 6"
    assert result.places == ["tp = 3", "ep = 3"]
    assert place_(on(8, "tp = 4, ep = 4, etp = 1"), model=model, prompts=8).codes == []


def test_A11_legal_sizes_of_52_heads(place_: Any, hf_model: Any) -> None:
    model = hf_model(num_attention_heads=52, num_key_value_heads=52, intermediate_size=1664)
    result = place_(on(8, "tp = 8"), model=model)
    assert result.codes == ["RLF2001"]
    assert "`tp = 8` does not divide the 52 attention heads of `actor`" in result.words
    assert "legal: tp 1, 2, 4, 13, 26, 52" in result.words


def test_A12_key_value_heads_are_replicated_or_refused(place_: Any, hf_model: Any) -> None:
    model = hf_model(num_attention_heads=24, num_key_value_heads=4, head_dim=128, intermediate_size=3072)
    twice = place_(on(8, "tp = 8"), model=model)
    assert [stage.kv_copies for stage in twice.plan.stages if stage.layout is not None] == [2, 2]
    assert "kv heads x2" in twice.shown
    once = place_(on(8, "tp = 4"), model=model)
    assert "kv heads" not in once.shown
    refused = place_(on(6, "tp = 6"), model=model, prompts=6)
    assert refused.codes == ["RLF2001"]
    assert "`tp = 6` and the 4 key-value heads of `actor` do not divide each other" in refused.words
    assert "legal: tp 1, 2, 4, 8, 12, 24" in refused.words


@pytest.mark.parametrize("cp", [1, 2, 4, 8, 40])
def test_A13_sizes_of_context_parallelism_that_are_legal(cp: int, place_: Any, hf_model: Any) -> None:
    model = hf_model(num_attention_heads=40, num_key_value_heads=8)
    result = place_(on(40, f"cp = {cp}"), model=model, prompts=40)
    assert result.codes == []
    copies = {stage.kv_copies for stage in result.plan.stages if stage.layout is not None}
    assert copies == ({5} if cp == 40 else {1})


@pytest.mark.parametrize(("cp", "devices"), [(5, 40), (16, 48)])
def test_A13_sizes_that_are_not(cp: int, devices: int, place_: Any, hf_model: Any) -> None:
    """2 key-value heads over 4 ranks are two empty shards; with 8 over 5 no rank has a whole number."""
    result = place_(
        on(devices, f"cp = {cp}"), model=hf_model(num_attention_heads=40, num_key_value_heads=8), prompts=48
    )
    assert set(result.codes) == {"RLF2001"}
    assert f"`cp = {cp}`" in result.words
    assert "legal: cp 1, 2, 4, 8, 40" in result.words


def test_A14_30_layers_over_4_stages(place_: Any, hf_model: Any) -> None:
    model = hf_model(num_hidden_layers=30)
    result = place_(on(8, "pp = 4"), model=model)
    assert result.codes == ["RLF2001"]
    assert "`pp = 4` does not divide the 30 layers of `actor`" in result.words
    assert "`split = [8, 8, 7, 7]`" in result.words
    fine = place_(on(8, "pp = 4, split = [8, 8, 7, 7]"), model=model)
    layouts = [node.placement.layout for node in fine.flow.nodes.values() if node.placement.layout is not None]
    assert layouts
    for layout in layouts:
        parts = [layout.layers_of(stage, 30) for stage in range(layout.pp)]
        assert sorted(layer for part in parts for layer in part) == list(range(30))
    lost = place_(on(8, "pp = 4, split = [7, 7, 7, 7]"), model=model)
    assert "the layers of `split` sum to 28, and `actor` has 30" in lost.words


def test_A15_the_grid_of_the_experts(place_: Any, hf_model: Any) -> None:
    model = hf_model(**MOE)
    result = place_(on(4, "tp = 4, ep = 4"), model=model)
    assert result.codes == ["RLF2001"]
    assert "4 (as `tp`, since `etp` is not given) x pp 1 = 16 does not fit the 4 devices of the pool" in result.words
    assert "`etp = 1`" in result.words
    assert place_(on(4, "tp = 4, ep = 4, etp = 1"), model=model).codes == []


def test_A17_an_embedding_larger_than_a_bucket_is_sent_in_pieces(place_: Any, hf_model: Any) -> None:
    """248320 x 5120 in 16 bits is 2425 MiB; two buckets of 1 GiB take it in 3 pieces."""
    model = hf_model(
        vocab_size=248_320, hidden_size=5120, tie_word_embeddings=True, head_dim=128, num_attention_heads=40
    )
    apart = (
        "pool rollout = 8 devices pool learner = 8 devices place actor.generate on rollout place actor.train on learner"
    )
    result = place_(apart, model=model)
    (reshard,) = result.plan.reshards
    assert reshard.bucket_bytes == 2048 * 2**20 < 248_320 * 5120 * 2 == 2425 * 2**20
    assert dict(reshard.split)["model.embed_tokens.weight"] == 3
    assert "model.embed_tokens.weight in 3 pieces" in result.shown
    assert print_flow(parse_flow(print_flow(result.flow))) == print_flow(result.flow)
    halved = place_(apart.replace("generate on rollout", "generate on rollout with tp = 4"), model=model)
    assert halved.plan.reshards[0].split == (), "606 MiB for a rank fit"


def test_A17_so_are_experts(place_: Any, hf_model: Any) -> None:
    """64 experts of 4096 x 4096 in 16 bits are 2 GiB a projection."""
    sizes = {**MOE, "num_experts": 64, "moe_intermediate_size": 4096, "hidden_size": 4096, "num_hidden_layers": 2}
    apart = (
        "pool rollout = 4 devices pool learner = 8 devices place actor.generate on rollout place actor.train on learner"
    )
    result = place_(apart + " with pp = 2, tp = 4", model=hf_model(**sizes))
    (reshard,) = result.plan.reshards
    pieces = dict(reshard.split)
    assert {name.split(".")[3:5] == ["mlp", "experts"] for name in pieces} == {True}
    assert min(pieces.values()) >= 2


@pytest.mark.parametrize("same_pool", [True, False])
def test_A20_pipelines_of_other_lengths_compile(same_pool: bool, place_: Any) -> None:
    """Training over 4 pipeline stages, generation over 2: the reshard moves layers between stages."""
    pools = "pool a = 8 devices pool b = 8 devices" if not same_pool else "pool a = 8 devices"
    other = "a" if same_pool else "b"
    result = place_(f"{pools} place actor.generate on a with pp = 2 place actor.train on {other} with pp = 4")
    assert result.codes == []
    (reshard,) = result.plan.reshards
    assert reshard.received == reshard.lower_bound > 0
