"""Facts of an architecture from a Hugging Face config.json, under the names that models.toml uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QKV_BIAS = {"qwen2": True, "qwen2_moe": True}
_QK_NORM = {"qwen3": True, "qwen3_moe": True}
_FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2.5",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2.5",
    "qwen3_moe": "qwen3",
    "mixtral": "llama",
    "deepseek_v3": "deepseek",
}


def facts_of_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The facts, or None for a model type that is not known here or a config without one of the numbers.

    A composite model keeps its text part under `text_config`; what stands there wins, and what stands only there counts
    (the tie flag of some checkpoints does). Only architectures whose every tensor follows from these facts are known:
    a wrong guess would be a wrong memory table.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        return None
    try:
        facts = _common(config, str(kind))
        if kind == "deepseek_v3":
            facts |= _latent_attention(config)
        if kind in ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3"):
            facts |= _experts(config, str(kind))
    except (KeyError, TypeError, ZeroDivisionError):
        return None
    numbers = (value for key, value in facts.items() if key.endswith(("_size", "_layers", "_heads", "_dim")))
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        return None
    return facts


def _common(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    return {
        "family": _FAMILIES[kind],
        "kind": "dense",
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "norms_per_layer": 2,
        "vocab_size": config["vocab_size"],
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_position_embeddings": config.get("max_position_embeddings", 0),
        "attention": "gqa",
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "qkv_bias": bool(config.get("attention_bias", _QKV_BIAS.get(kind, False))),
        "qk_norm": _QK_NORM.get(kind, False),
    }


def _latent_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {"attention": "mla", "qkv_bias": False, **{key: config[key] for key in keys}}


def _experts(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if not isinstance(experts, int):
        raise KeyError("experts")
    inner = config["intermediate_size"] if kind == "mixtral" else config["moe_intermediate_size"]
    shared = config.get("shared_expert_intermediate_size") or inner * (config.get("n_shared_experts") or 0)
    return {
        "kind": "moe",
        "num_dense_layers": config.get("first_k_dense_replace", 0),
        "num_mtp_layers": 0,  # checkpoints have them, training and sampling do not load them
        "num_routed_experts": experts,
        "moe_ffn_hidden_size": inner,
        "top_k": config["num_experts_per_tok"],
        "num_shared_experts": 1 if shared else 0,
        "shared_expert_ffn_hidden_size": shared,
        "router_expert_bias": kind == "deepseek_v3",
    }


def facts_of_tiny(
    architecture: str,
    vocabulary: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    context: int,
    experts: int = 0,
    experts_per_token: int = 0,
) -> dict[str, Any]:
    """Of a tiny model, `vocabulary` counting the end and padding tokens; its embeddings are tied. `experts` 0: dense;
    otherwise every layer has them, each of inner size `intermediate`."""
    facts = {
        "family": _FAMILIES[architecture],
        "kind": "dense",
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": intermediate,
        "norms_per_layer": 2,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "max_position_embeddings": context,
        "attention": "gqa",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "qkv_bias": False,
        "qk_norm": _QK_NORM.get(architecture, False),
    }
    if experts:
        facts |= {
            "kind": "moe",
            "num_dense_layers": 0,
            "num_mtp_layers": 0,
            "num_routed_experts": experts,
            "moe_ffn_hidden_size": intermediate,
            "top_k": experts_per_token,
            "num_shared_experts": 0,
            "shared_expert_ffn_hidden_size": 0,
            "router_expert_bias": False,
        }
    return facts
