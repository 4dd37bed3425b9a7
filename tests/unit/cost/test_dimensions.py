"""Sizes of models: counts against those of the architecture, and facts that are missing."""

from __future__ import annotations

import pytest

from rlflow.cluster import presets
from rlflow.cluster.presets.architecture import Architecture, architecture
from rlflow.cost.dimensions import dimensions
from rlflow.cost.errors import LayoutError, UnknownFactError
from rlflow.cost.flops import products
from rlflow.cost.shards import check_layout, layers_of, shard
from rlflow.ir.flow import Layout


@pytest.mark.parametrize("name", presets.model_names())
def test_one_device_holds_every_parameter(name):
    """Two independent counts: sharding over one device, and the counting rules of models.toml."""
    model, layout = dimensions(architecture(name)), Layout()
    part = shard(model, layout, layers_of(model, layout)[0])
    assert part.total == architecture(name).params()
    assert part.expert == architecture(name).params_routed_experts


@pytest.mark.parametrize("name", presets.model_names())
def test_products_are_the_active_matrices(name):
    """What a token is multiplied with: active parameters but for norms and biases, below a tenth of a percent."""
    counted, active = products(dimensions(architecture(name))), architecture(name).params_active_no_embedding
    assert active * 0.999 < counted <= active


@pytest.mark.parametrize("name", presets.model_names())
@pytest.mark.parametrize(
    "fact", ["num_layers", "vocab_size", "attention", "kind", "norms_per_layer", "num_attention_heads"]
)
def test_a_missing_fact_is_named(name, fact):
    facts = dict(presets.model(name))
    del facts[fact]
    with pytest.raises(UnknownFactError, match=f"`broken` has no fact `{fact}`") as error:
        dimensions(Architecture("broken", facts))
    assert error.value.fact == fact


def test_queries_need_not_be_compressed():
    """DeepSeek-V2-Lite: q_lora_rank null."""
    facts = dict(presets.model("deepseek_v3_671b")) | {"q_lora_rank": None}
    model = dimensions(Architecture("m", facts))
    h, heads = 7168, 128
    assert model.attention_matrices == h * heads * 192 + h * (512 + 64) + heads * (128 + 128) * 512 + heads * 128 * h


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(pp=5), "does not divide the 36 layers"),
        (Layout(pp=2, split=(20, 20)), "needs 2 parts of 36"),
        (Layout(pp=2, split=(12, 12, 12)), "has 3 parts"),
        (Layout(dp=2, ep=4), "does not divide the 2 ranks"),
        (Layout(dp=0), "at least 1"),
        (Layout(zero=4), "zero is 0, 1, 2 or 3"),
    ],
)
def test_layouts_that_describe_nothing(model, layout, message):
    with pytest.raises(LayoutError, match=message):
        check_layout(model("qwen3_8b"), layout)


def test_layers_are_those_of_the_layout(model):
    """Dense and expert layers of every rank against `Layout.layers_of`, with a split, virtual stages and dense layers."""
    deepseek = model("deepseek_v3_671b")
    for layout in (
        Layout(pp=8, split=(7, 7, 8, 8, 8, 8, 8, 7)),
        Layout(pp=4, vp=2, split=(2, 8, 9, 9, 9, 8, 8, 8)),
        Layout(pp=61),
        Layout(pp=2, split=(0, 61)),
    ):
        for stage in layers_of(deepseek, layout):
            mine = layout.layers_of(stage.stage, 61)
            assert (stage.dense, stage.moe) == (sum(i < 3 for i in mine), sum(i >= 3 for i in mine))
