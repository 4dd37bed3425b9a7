"""Every preset's tensors, and names of checkpoints against them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlflow.cluster import presets
from rlflow.cluster.presets.architecture import Architecture, architecture
from rlflow.reshard.catalogue import EMBEDDING, HEAD, Catalogue, catalogue
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.names import Source, canonical, match_names


@pytest.mark.parametrize("name", presets.model_names())
def test_the_elements_are_the_parameters(name):
    model = architecture(name)
    assert catalogue(model, mtp=False).elements == model.params() == model.facts["params_total"]
    assert catalogue(model).elements == model.params() + model.params_mtp
    assert model.params_mtp == model.facts.get("params_mtp", 0)


def tensors_of(name):
    return {s.name: s.shape for s in catalogue(architecture(name))}


def test_shapes_of_llama_qwen_and_deepseek():
    llama = tensors_of("llama3_1_8b")
    assert llama["model.layers.31.self_attn.k_proj.weight"] == (1024, 4096)
    assert llama["model.layers.0.mlp.down_proj.weight"] == (4096, 14336)
    assert "model.layers.0.self_attn.q_proj.bias" not in llama
    assert tensors_of("qwen2_5_7b")["model.layers.0.self_attn.v_proj.bias"] == (512,)
    qwen = tensors_of("qwen3_30b_a3b")
    assert qwen["model.layers.0.self_attn.q_norm.weight"] == (128,)
    assert qwen["model.layers.47.mlp.experts.gate_proj.weight"] == (128, 768, 2048)
    assert not any("shared_experts" in name for name in qwen)
    deepseek = tensors_of("deepseek_v3_671b")
    assert deepseek["model.layers.0.mlp.gate_proj.weight"] == (18432, 7168)
    assert "model.layers.0.mlp.gate.weight" not in deepseek
    assert deepseek["model.layers.3.mlp.gate.e_score_correction_bias"] == (256,)
    assert deepseek["model.layers.60.self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert deepseek["model.layers.60.self_attn.q_b_proj.weight"] == (24576, 1536)
    assert deepseek["model.layers.61.eh_proj.weight"] == (7168, 14336)
    assert tensors_of("pangu_ultra_moe_718b")["model.layers.0.post_mlp_layernorm.weight"] == (7680,)


def test_facts_without_a_rule_are_refused():
    facts = dict(architecture("qwen3_8b").facts)
    with pytest.raises(ReshardError, match="no sharding rules for attention 'linear'"):
        catalogue(Architecture("x", facts | {"attention": "linear"}))
    with pytest.raises(ReshardError, match="3 norms per layer"):
        catalogue(Architecture("x", facts | {"norms_per_layer": 3}))


def test_a_name_twice_is_refused():
    spec = catalogue(architecture("qwen3_8b"))[HEAD]
    with pytest.raises(ReshardError, match=r"lm_head.weight is in the catalogue 2 times"):
        Catalogue((spec, spec), 36)


# --- names of a checkpoint -------------------------------------------------------------------------------------------


def test_a_checkpoint_of_single_experts_matches():
    tensors = catalogue(architecture("qwen3_30b_a3b"))
    shapes = {}
    for spec in tensors:
        if ".experts." in spec.name:
            before, after = spec.name.split(".experts.")
            shapes |= {f"{before}.experts.{e}.{after}": spec.shape[1:] for e in range(spec.shape[0])}
        else:
            shapes[spec.name] = spec.shape
    found = match_names(tensors, shapes)
    place = Source("model.layers.30.mlp.experts.up_proj.weight", 17)
    assert found["model.layers.30.mlp.experts.17.up_proj.weight"] == (place,)
    assert len(found) == len(set(found.values())) == len(shapes)


def test_all_problems_are_listed():
    """What a converter does not know must not be skipped, nor half a set of experts pass."""
    tensors = catalogue(architecture("qwen3_30b_a3b"))
    shapes = {s.name: s.shape for s in tensors}
    experts = "model.layers.5.mlp.experts.down_proj.weight"
    del shapes["model.norm.weight"], shapes[experts]
    shapes |= {f"model.layers.5.mlp.experts.{e}.down_proj.weight": (2048, 768) for e in range(128) if e not in (3, 9)}
    shapes["model.layers.2.self_attn.gate.weight"] = (4, 4)
    shapes["model.layers.0.self_attn.q_proj.weight"] = (2048, 2048)
    shapes["model.layers.7.mlp.experts.0.up_proj.weight"] = (768, 2048)
    with pytest.raises(ReshardError) as caught:
        match_names(tensors, shapes)
    assert caught.value.problems == (
        "model.layers.0.self_attn.q_proj.weight has shape [2048, 2048], expected [4096, 2048]",
        "unknown tensor model.layers.2.self_attn.gate.weight [4, 4]",
        f"{experts}: experts [3, 9] are missing",
        "model.layers.7.mlp.experts.up_proj.weight is given whole and for 1 experts",
        "model.norm.weight [2048] is missing",
    )


def test_a_tied_head_is_the_embedding_and_an_auxiliary_head_is_not():
    model = architecture("qwen3_8b")
    tied = Architecture("tied", dict(model.facts) | {"tie_word_embeddings": True})
    tensors = catalogue(tied)
    assert HEAD not in tensors.by_name
    assert tensors.elements == tied.params()
    shapes = {s.name: s.shape for s in tensors}
    assert HEAD not in match_names(tensors, shapes | {HEAD: tensors[EMBEDDING].shape})
    with pytest.raises(ReshardError, match=r"unknown tensor draft\.lm_head\.weight"):
        match_names(tensors, shapes | {"draft.lm_head.weight": tensors[EMBEDDING].shape})
    with pytest.raises(ReshardError, match="is tied to"):
        match_names(tensors, shapes | {HEAD: (1, 1)})
    auxiliary = replace(tensors[EMBEDDING], name="draft.lm_head.weight")
    wider = Catalogue((*tensors.tensors, auxiliary), 36, tied=True)
    assert "draft.lm_head.weight" in match_names(wider, shapes | {auxiliary.name: auxiliary.shape})
    untied = catalogue(model)
    assert match_names(untied, {s.name: s.shape for s in untied})[HEAD] == (Source(HEAD),)


def test_canonical_names():
    experts = "model.layers.3.mlp.experts."
    assert canonical(f"{experts}17.gate_proj.weight") == (Source(f"{experts}gate_proj.weight", 17),)
    assert canonical("model.layers.3.block_sparse_moe.experts.5.w2.weight") == (
        Source(f"{experts}down_proj.weight", 5),
    )
    assert canonical("model.layers.3.block_sparse_moe.experts.5.w3.weight") == (Source(f"{experts}up_proj.weight", 5),)
    assert canonical("model.layers.3.block_sparse_moe.gate.weight") == (Source("model.layers.3.mlp.gate.weight"),)
    assert canonical(f"{experts}down_proj") == (Source(f"{experts}down_proj.weight"),)
    assert canonical(f"{experts}gate_up_proj") == (
        Source(f"{experts}gate_proj.weight", None, 0, 2),
        Source(f"{experts}up_proj.weight", None, 1, 2),
    )
    shared = "model.layers.3.mlp.shared_experts.gate_proj.weight"
    assert canonical(shared) == canonical(shared.replace("experts", "expert")) == (Source(shared),)
    assert canonical("model.layers.3.input_layernorm.weight") == (Source("model.layers.3.input_layernorm.weight"),)


def test_the_names_of_live_transformers_models():
    """As named_parameters and persistent buffers give them: stacked experts, gate and up in one."""
    facts = dict(architecture("deepseek_v3_671b").facts) | {"num_layers": 4, "num_mtp_layers": 0}
    tensors = catalogue(Architecture("short", facts))
    shapes = {s.name: s.shape for s in tensors if ".mlp.experts." not in s.name}
    stacked = {"gate_up_proj": (256, 4096, 7168), "down_proj": (256, 7168, 2048)}
    shapes |= {f"model.layers.3.mlp.experts.{name}": shape for name, shape in stacked.items()}
    found = match_names(tensors, shapes)
    assert {place.tensor for places in found.values() for place in places} == {s.name for s in tensors}
    wrong = "model.layers.3.mlp.experts.gate_up_proj"
    with pytest.raises(ReshardError, match=r"has shape \[256, 2048, 7168\], expected \[256, 4096, 7168\]"):
        match_names(tensors, shapes | {wrong: (256, 2048, 7168)})
    with pytest.raises(ReshardError, match=r"gate_up_proj and .*gate_proj\.weight are both"):
        match_names(tensors, shapes | {"model.layers.3.mlp.experts.gate_proj.weight": (256, 2048, 7168)})
    with pytest.raises(ReshardError, match=r"experts\.256\.down_proj\.weight: there are 256 experts"):
        match_names(tensors, shapes | {"model.layers.3.mlp.experts.256.down_proj.weight": (7168, 2048)})
