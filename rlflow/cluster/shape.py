"""The sizes of a model that sharding must divide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`experts` is 0 for a dense model; a width of 0 is not known."""

    layers: int
    heads: int
    kv_heads: int
    experts: int = 0
    intermediate: int = 0
    """Width of the feed-forward part of a dense layer."""
    expert_intermediate: int = 0
    """Width of one expert."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """From a Hugging Face config.json; None when it lacks one of the numbers. Of a composite model those of its
        text part."""
        text = config.get("text_config")
        if isinstance(text, Mapping):
            config = {**config, **text}
        heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
        kv_heads = config.get("num_key_value_heads", heads)
        experts = config.get("num_experts", config.get("num_local_experts", config.get("n_routed_experts", 0))) or 0
        numbers = (layers, heads, kv_heads, experts)
        if not all(isinstance(n, int) for n in numbers):
            return None
        widths = [config.get(key) for key in ("intermediate_size", "moe_intermediate_size")]
        known = [width if isinstance(width, int) and not isinstance(width, bool) else 0 for width in widths]
        return cls(*numbers, *known)  # type: ignore[arg-type]

    @classmethod
    def from_preset(cls, facts: Mapping[str, Any]) -> ModelShape:
        """From a preset. With latent attention (MLA) every head has its own keys and values."""
        heads = facts["num_attention_heads"]
        return cls(
            facts["num_layers"],
            heads,
            facts.get("num_key_value_heads", heads),
            facts.get("num_routed_experts", 0),
            facts.get("ffn_hidden_size", 0),
            facts.get("moe_ffn_hidden_size", 0),
        )
