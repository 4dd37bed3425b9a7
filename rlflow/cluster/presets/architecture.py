"""Architectures of model presets, and their parameters counted from them.

The counting rules are those of models.toml, whose header explains them. All counts are parameters; a fact that the file
leaves out is a KeyError where it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.cluster import presets
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer: `facts` as models.toml has them, and what follows from them."""

    name: str
    facts: Mapping[str, Any]

    @property
    def is_moe(self) -> bool:
        return bool(self.facts["kind"] == "moe")

    @property
    def num_layers(self) -> int:
        return int(self.facts["num_layers"])

    @property
    def num_dense_layers(self) -> int:
        """The first layers, whose feed-forward part is not split into experts."""
        return int(self.facts["num_dense_layers"]) if self.is_moe else self.num_layers

    @property
    def hidden_size(self) -> int:
        return int(self.facts["hidden_size"])

    @property
    def embedding(self) -> int:
        """The input embedding; the output head is as large, and the same where the two are tied."""
        return int(self.facts["vocab_size"]) * self.hidden_size

    @property
    def attention(self) -> int:
        """Of one layer."""
        facts, hidden, heads = self.facts, self.hidden_size, int(self.facts["num_attention_heads"])
        if facts["attention"] == "mla":
            q_rank, kv_rank = int(facts["q_lora_rank"]), int(facts["kv_lora_rank"])
            nope, rope, value = (int(facts[k]) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
            queries = hidden * q_rank + q_rank + q_rank * heads * (nope + rope)
            keys_values = hidden * (kv_rank + rope) + kv_rank + kv_rank * heads * (nope + value)
            return queries + keys_values + heads * value * hidden
        head = int(facts["head_dim"])
        q_size, kv_size = heads * head, int(facts["num_key_value_heads"]) * head
        count = hidden * q_size + 2 * hidden * kv_size + q_size * hidden
        if facts["qkv_bias"]:
            count += q_size + 2 * kv_size
        return count + (2 * head if facts["qk_norm"] else 0)

    @property
    def norms(self) -> int:
        """Of one layer."""
        return int(self.facts["norms_per_layer"]) * self.hidden_size

    def feed_forward(self, inner: int) -> int:
        """Gate, up and down."""
        return 3 * self.hidden_size * inner

    @property
    def dense_layer(self) -> int:
        return self.attention + self.norms + self.feed_forward(int(self.facts["ffn_hidden_size"]))

    def moe_layer(self, *, active: bool = False) -> int:
        """Of one mixture-of-experts layer; `active`: what one token uses, the router counted whole without its bias."""
        facts = self.facts
        experts = int(facts["num_routed_experts"])
        count = self.attention + self.norms + self.hidden_size * experts
        if facts["router_expert_bias"] and not active:
            count += experts
        used = int(facts["top_k"]) if active else experts
        count += used * self.feed_forward(int(facts["moe_ffn_hidden_size"]))
        return count + self.feed_forward(int(facts["shared_expert_ffn_hidden_size"]))

    def params(self, *, active: bool = False) -> int:
        """All but multi-token prediction; `active`: those that one token uses, both embeddings included."""
        embeddings = self.embedding * (1 if self.facts["tie_word_embeddings"] else 2)
        count = embeddings + self.hidden_size
        if self.num_dense_layers:
            count += self.num_dense_layers * self.dense_layer
        if self.is_moe:
            count += (self.num_layers - self.num_dense_layers) * self.moe_layer(active=active)
        return count

    @property
    def params_active_no_embedding(self) -> int:
        """What FLOPs follow from: reading the input embedding is no product."""
        return self.params(active=True) - self.embedding

    @property
    def params_routed_experts(self) -> int:
        """All routed experts of all layers, which expert parallelism divides; 0 for a dense model."""
        if not self.is_moe:
            return 0
        layers = self.num_layers - self.num_dense_layers
        each = self.feed_forward(int(self.facts["moe_ffn_hidden_size"]))
        return layers * int(self.facts["num_routed_experts"]) * each

    @property
    def params_mtp(self) -> int:
        """Of the multi-token prediction modules, which share embedding and head."""
        modules = int(self.facts.get("num_mtp_layers", 0))
        return modules * (self.moe_layer() + 2 * self.hidden_size**2 + 3 * self.hidden_size) if modules else 0

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Keys and values of one token over all layers; with mla the compressed form."""
        facts = self.facts
        if facts["attention"] == "mla":
            return self.num_layers * (int(facts["kv_lora_rank"]) + int(facts["qk_rope_head_dim"])) * bytes_per_value
        return 2 * self.num_layers * int(facts["num_key_value_heads"]) * int(facts["head_dim"]) * bytes_per_value


def architecture(name: str) -> Architecture:
    """The architecture of a model preset. KeyError for an unknown name."""
    return Architecture(name, presets.model(name))
