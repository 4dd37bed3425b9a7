"""Small models and batches for the parallel tests, the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.models import LoadedModel, load_model
from rlflow.ir.ops import TinyModel

CLASSES: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
ALPHABET = "0123456789+="


def make(kind: str, **changes: Any) -> LoadedModel:
    """A model with a vocabulary of 14, 4 heads of which 2 have keys, and weights large enough to matter."""
    loaded = load_model(TinyModel(architecture="qwen3", alphabet=ALPHABET, hidden=32), Path())
    config_class, model_class = CLASSES[kind]
    settings = {
        "vocab_size": 14,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 13,
    }
    if kind == "qwen3_moe":
        settings |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = model_class(config_class(**{**settings, **changes})).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0 if parameter.ndim > 1 else 1.0).add_(0.05 * torch.randn_like(parameter))
    return LoadedModel(model, loaded.tokenizer, loaded.eos_ids, loaded.pad_id, loaded.context)


def samples(rows: int, seed: int = 1) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = [(int(rng.integers(1, 8)), int(rng.integers(1, 9))) for _ in range(rows)]
    return Batch(
        rows,
        {
            "prompt_ids": Packed.from_rows([rng.integers(0, 12, p).tolist() for p, _ in lengths], torch.int64),
            "response_ids": Packed.from_rows([rng.integers(0, 14, r).tolist() for _, r in lengths], torch.int64),
        },
    )


def tokens_beside(batch: Batch, seed: int) -> Packed:
    """Log-probabilities as a reference might have them."""
    responses = batch.packed("response_ids")
    generator = torch.Generator().manual_seed(seed)
    return Packed(-2.0 * torch.rand(len(responses.values), generator=generator) - 1.0, responses.offsets)
