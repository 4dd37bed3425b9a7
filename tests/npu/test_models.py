"""A whole training step and a whole generation of small models on fake npu tensors: the runtime's own forward, loss and
decoder over served models, every operator through torch_npu."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rlflow.backends.ray_runtime.algorithms.losses import ppo_clip
from rlflow.backends.ray_runtime.forward import response_log_probs
from rlflow.backends.ray_runtime.generic_decoder import GenericDecoder
from rlflow.backends.ray_runtime.kernels.adamw import FusedAdamW
from rlflow.backends.ray_runtime.kernels.serve import serve
from rlflow.backends.ray_runtime.packing import MicroBatch

LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
MOE = SIZES | {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
LATENT = SIZES | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3 moe": Qwen3MoeConfig(**MOE),
    "deepseek v3": DeepseekV3Config(**LATENT),
}
NORMS = {"llama": 5, "qwen2": 5, "qwen3": 9, "qwen3 moe": 9, "deepseek v3": 9}
"""Of the two layers and the end."""
EXPERT_LAYERS = {"qwen3 moe": 2, "deepseek v3": 1}


def fake_model(name: str, dtype: torch.dtype) -> Any:
    with torch.device("npu"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=dtype).eval()
    serve(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"npu"}
    return model


def micro_batch() -> MicroBatch:
    """Two rows of 12 tokens, of which the last 5 and 3 are responses."""
    ids = torch.zeros(2, 12, dtype=torch.int64)
    read = torch.tensor([7, 8, 9, 10, 11, 21, 22, 23])
    return MicroBatch(np.arange(2), ids, read, torch.zeros(8, dtype=torch.int64), np.arange(8), torch.tensor([5, 3]))


@pytest.mark.parametrize(
    ("compute", "weights"), [("fp32", torch.float32), ("bf16", torch.float32), ("fp32", torch.bfloat16)]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_training_step(name: str, compute: Any, weights: torch.dtype, calls: Any) -> None:
    """Forward, PPO's loss, backward, AdamW: fp32 weights, bf16 products over them, and bf16 weights."""
    with calls() as seen:
        model = fake_model(name, weights)
        optimizer = FusedAdamW(model.parameters(), lr=1e-5)
        seen.clear()
        logp, entropy = response_log_probs(model, compute, micro_batch(), 1.0, "gradient", limit=1 << 20)
        assert logp.shape == entropy.shape == (8,)
        advantages = torch.ones(8, device="npu")
        loss = ppo_clip(logp, logp.detach(), advantages, 0.2, 0.2).loss.sum() - 0.01 * entropy.mean()
        loss.backward()
        lacking = [n for n, p in model.named_parameters() if p.grad is None]
        assert lacking == []
        assert all(p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in model.parameters())
        optimizer.step()
        count = Counter(seen)
    experts = EXPERT_LAYERS.get(name, 0)
    shared = experts if name == "deepseek v3" else 0
    assert count["npu_fusion_attention"] == count["npu_fusion_attention_grad"] == LAYERS
    assert count["npu_rms_norm"] == count["npu_rms_norm_backward"] == NORMS[name]
    assert count["npu_rotary_mul"] == count["npu_rotary_mul_backward"] == 2 * LAYERS
    assert count["npu_swiglu"] == count["npu_swiglu_backward"] == LAYERS + shared
    assert count["npu_grouped_matmul"] == 2 * 3 * experts  # two products, each with two more in the backward
    assert count["npu_moe_token_permute"] == count["_npu_moe_token_unpermute"] == experts
    assert count["npu_apply_adam_w"] == len(list(model.parameters()))
    assert count["npu_add_rms_norm"] == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_generation(name: str, calls: Any) -> None:
    """The runtime's decoder: a prompt padded on the left, repeated for a group, two steps."""
    with calls() as seen, torch.no_grad():
        decoder = GenericDecoder(fake_model(name, torch.bfloat16))
        seen.clear()
        ids = torch.zeros(2, 6, dtype=torch.int64, device="npu")
        logits = decoder.prefill(ids, torch.tensor([6, 4], device="npu"), 8)
        assert (logits.shape, logits.device.type) == ((2, 64), "npu")
        prompt = Counter(seen)
        decoder.select(torch.tensor([0, 0, 1, 1], device="npu"))
        for _ in range(2):
            seen.clear()
            logits = decoder.step(torch.zeros(4, dtype=torch.int64, device="npu"))
            assert logits.shape == (4, 64)
            assert Counter(seen) == prompt
    experts = EXPERT_LAYERS.get(name, 0)
    assert prompt["npu_fused_infer_attention_score"] == prompt["npu_add_rms_norm"] == LAYERS
    assert prompt["npu_rms_norm"] == NORMS[name] - LAYERS
    assert prompt["npu_moe_init_routing_v2"] == experts
    assert prompt["npu_grouped_matmul"] == 2 * experts
    gate = "npu_moe_gating_top_k" if name == "deepseek v3" else "npu_moe_gating_top_k_softmax"
    assert prompt[gate] == experts
    assert not [operator for operator in prompt if "fusion_attention" in operator]
