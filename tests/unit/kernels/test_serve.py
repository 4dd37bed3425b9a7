"""Served models compute what transformers' own do: logits, gradients, cached decoding; and stay what they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlflow.backends.ray_runtime.kernels import kernel
from rlflow.backends.ray_runtime.kernels.serve import serve
from rlflow.diagnostics.diagnostic import RunFailure

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2 with a window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3 moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2, mlp_only_layers=[0], norm_topk_prob=True),
    "deepseek v3": DeepseekV3Config(**SIZES | LATENT, q_lora_rank=24, rope_interleave=True),
    "deepseek v3, halves": DeepseekV3Config(**SIZES | LATENT, q_lora_rank=None, rope_interleave=False),
}  # fmt: skip
SERVED = {
    "llama": {"LlamaRMSNorm": 5, "LlamaMLP": 2, "LlamaAttention": 2, "LlamaDecoderLayer": 2},
    "qwen3": {"Qwen3RMSNorm": 9, "Qwen3MLP": 2, "Qwen3Attention": 2, "Qwen3DecoderLayer": 2},
    "qwen3 moe": {"Qwen3MoeRMSNorm": 9, "Qwen3MoeMLP": 1, "Qwen3MoeAttention": 2, "Qwen3MoeDecoderLayer": 2, "Qwen3MoeTopKRouter": 1},
    "deepseek v3": {"DeepseekV3RMSNorm": 9, "DeepseekV3MLP": 2, "DeepseekV3Attention": 2, "DeepseekV3DecoderLayer": 2, "DeepseekV3TopkRouter": 1},
}  # fmt: skip


def pair(name: str) -> tuple[Any, Any]:
    """transformers' model with its own eager attention and experts, and a served copy of the same weights."""
    torch.manual_seed(0)
    own = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in own.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)  # norms and routers start as ones and zeros
    if "moe" in name or "deepseek" in name:
        own.set_experts_implementation("eager")
    served = copy.deepcopy(own)
    serve(served)
    return own, served


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients(name: str) -> None:
    own, served = pair(name)
    ids = torch.randint(0, 32, (3, 9), generator=torch.Generator().manual_seed(1))
    results = [model(input_ids=ids, use_cache=False).logits for model in (own, served)]
    near(results[1], results[0])
    for logits in results:
        torch.log_softmax(logits, -1)[:, :, 3].sum().backward()
    gradients = {n: p.grad for n, p in own.named_parameters()}
    assert any("mlp" in n for n in gradients)
    for n, p in served.named_parameters():
        near(p.grad, gradients[n])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_padded_prompt_and_two_cached_steps(name: str) -> None:
    own, served = pair(name)
    ids = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, :3] = 0  # on the left
    with torch.no_grad():
        for model in (own, served):
            model.cache = DynamicCache(config=model.config)
        for step in range(3):
            new = ids if step == 0 else ids[:, step : step + 1]
            mask = mask if step == 0 else torch.nn.functional.pad(mask, (0, 1), value=1)
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
            out = [
                m(input_ids=new, attention_mask=mask, position_ids=positions, past_key_values=m.cache).logits[:, -1]
                for m in (own, served)
            ]
            near(out[1], out[0])


def test_a_packed_row_is_two_sequences() -> None:
    own, served = pair("qwen3")
    ids = torch.randint(0, 32, (1, 8), generator=torch.Generator().manual_seed(3))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        out = [m(input_ids=ids, position_ids=positions, use_cache=False).logits for m in (own, served)]
        alone = served(input_ids=ids[:, 3:], use_cache=False).logits
    near(out[1], out[0])
    near(out[1][:, 3:], alone)


@pytest.mark.parametrize("name", SERVED)
def test_every_module_is_served_once(name: str) -> None:
    own, served = pair(name)
    assert serve(served) == SERVED[name]
    assert served.config._attn_implementation == "rlflow_kernels"
    assert own.state_dict().keys() == served.state_dict().keys()
    for mine, theirs in zip(served.modules(), own.modules(), strict=True):
        assert isinstance(mine, type(theirs))


def test_the_original_and_its_class_stay_as_they_are() -> None:
    own, served = pair("qwen3")
    assert type(own.model.norm).__name__ == "Qwen3RMSNorm"
    assert type(served.model.norm).__name__ == "ServedQwen3RMSNorm"
    assert own.config._attn_implementation == "eager"


def test_gradient_checkpointing_goes_on() -> None:
    own, served = pair("llama")
    served.activation_checkpointing_enable({"use_reentrant": False})
    served.train()
    ids = torch.arange(6)[None]
    for model in (own, served):
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    near(served.model.layers[0].mlp.up_proj.weight.grad, own.model.layers[0].mlp.up_proj.weight.grad)


def test_an_mlp_that_is_not_gated_by_silu_stays() -> None:
    config = LlamaConfig(**SIZES, hidden_act="gelu")
    model = AutoModelForCausalLM.from_config(config)
    assert "LlamaMLP" not in serve(model)


def test_dropout_is_refused_not_dropped() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, attention_dropout=0.1)).train()
    serve(model)
    with pytest.raises(RunFailure) as caught:
        model(input_ids=torch.arange(4)[None])
    assert caught.value.message == "kernel `attention`: dropout is 0.1, and there is none"


def test_a_step_runs_the_kernels_that_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    _, served = pair("qwen3 moe")
    called: set[str] = set()
    for each in list(kernel.ALL.values()):
        monkeypatch.setattr(each, "_passed", set())
        monkeypatch.setattr(each, "_check", lambda checker, *a, **k: called.add(checker._kernel))
    ids = torch.arange(5)[None]
    with torch.no_grad():
        served(input_ids=ids)
    inference = {"infer_attention", "add_rms_norm", "rms_norm", "rotary", "swiglu", "gating", "route", "grouped_matmul", "unpermute"}  # fmt: skip
    assert called == inference
    called.clear()
    served(input_ids=ids)
    assert called == (inference - {"infer_attention", "add_rms_norm"}) | {"attention"}
