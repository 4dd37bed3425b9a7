"""The sizes of a decoder-only transformer that FLOPs and bytes follow from, read once from its architecture.

Counts are parameters (of the whole model, nothing sharded), by the counting rules of models.toml.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.cluster.presets.architecture import Architecture
from rlflow.cost.errors import UnknownFactError
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Symbols in brackets are those of the literature: L, h, n_q, n_kv, d, f, V, E, k."""

    name: str
    layers: int
    """[L]"""
    dense_layers: int
    """The first layers, whose feed-forward part is not split into experts."""
    hidden: int
    """[h]"""
    vocab: int
    """[V]"""
    tied: bool
    """The output head is the input embedding."""
    norms: int
    """Norm vectors of one layer."""
    heads: int
    """[n_q]"""
    kv_heads: int
    """[n_kv]; with latent attention every head has its own keys and values."""
    key_size: int
    """Of one head, queries and keys [d]; with latent attention both parts, [d_nope + d_rope]."""
    value_size: int
    """Of one head [d or d_v]."""
    latent_q: int
    """Rank of the queries of latent attention (MLA), 0 = not compressed."""
    latent_kv: int
    """Rank of keys and values of latent attention, 0 = ordinary attention."""
    rope_size: int
    """Of the rotary part that all heads of latent attention share, else 0."""
    qkv_bias: bool
    qk_norm: bool
    ffn: int
    """Inner width of the feed-forward part of a dense layer [f], 0 where no layer has one."""
    ffn_matrices: int
    """3 = gated (gate, up, down), 2 = plain (up, down)."""
    dropout: bool
    """Trained with dropout, whose masks are kept (one byte a value)."""
    experts: int
    """[E], 0 for a dense model."""
    top_k: int
    """[k] routed experts of one token."""
    expert_ffn: int
    """Inner width of one expert."""
    shared_ffn: int
    """Inner width of all shared experts together."""
    router_bias: bool
    expert_groups_of_token: int
    """Groups of experts, one group on one host, that one token may reach; 0 = no limit."""

    def __hash__(self) -> int:
        # Layouts of one model are looked up by the hundred thousand; these tell models apart well enough.
        return hash((self.name, self.layers, self.hidden, self.vocab))

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def is_latent(self) -> bool:
        return self.latent_kv > 0

    @property
    def query_width(self) -> int:
        """Of all heads."""
        return self.heads * self.key_size

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.key_size

    @property
    def value_width(self) -> int:
        return self.kv_heads * self.value_size

    @property
    def output_width(self) -> int:
        """Of what attention hands to its output projection."""
        return self.heads * self.value_size

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def dense_ffn(self) -> int:
        """The feed-forward matrices of a dense layer."""
        return self.ffn_matrices * self.hidden * self.ffn

    @property
    def expert(self) -> int:
        """The matrices of one routed expert."""
        return self.ffn_matrices * self.hidden * self.expert_ffn

    @property
    def shared_expert(self) -> int:
        return self.ffn_matrices * self.hidden * self.shared_ffn

    @property
    def router(self) -> int:
        """Of one mixture-of-experts layer, without its bias."""
        return self.hidden * self.experts

    @property
    def attention_matrices(self) -> int:
        """Of one layer: what a token is multiplied with."""
        if not self.is_latent:
            return self.hidden * (self.query_width + self.key_width + self.value_width + self.output_width)
        q_rank, kv_rank = self.latent_q, self.latent_kv
        queries = q_rank * (self.hidden + self.query_width) if q_rank else self.hidden * self.query_width
        keys = self.hidden * (kv_rank + self.rope_size)
        up = self.heads * (self.key_size - self.rope_size + self.value_size) * kv_rank
        return queries + keys + up + self.output_width * self.hidden


def dimensions(architecture: Architecture) -> Dimensions:
    """Read an architecture. UnknownFactError names the first fact that it lacks.

    Two facts may be left out, with the meaning that models.toml's counting rules give them: `ffn_matrices` (3, gated)
    and `dropout` (false).
    """
    facts = _Facts(f"the model `{architecture.name}`", architecture.facts)
    moe = facts.text("kind") == "moe"
    latent = facts.text("attention") == "mla"
    layers, heads = facts.count("num_layers"), facts.count("num_attention_heads")
    dense_layers = facts.count("num_dense_layers") if moe else layers
    if latent:
        rope, value = facts.count("qk_rope_head_dim"), facts.count("v_head_dim")
        kv_heads, key = heads, facts.count("qk_nope_head_dim") + rope
        latent_q, latent_kv = facts.count("q_lora_rank"), facts.count("kv_lora_rank")
    else:
        kv_heads, key = facts.count("num_key_value_heads"), facts.count("head_dim")
        value, rope, latent_q, latent_kv = key, 0, 0, 0
    return Dimensions(
        name=architecture.name,
        layers=layers,
        dense_layers=dense_layers,
        hidden=facts.count("hidden_size"),
        vocab=facts.count("vocab_size"),
        tied=facts.flag("tie_word_embeddings"),
        norms=facts.count("norms_per_layer"),
        heads=heads,
        kv_heads=kv_heads,
        key_size=key,
        value_size=value,
        latent_q=latent_q,
        latent_kv=latent_kv,
        rope_size=rope,
        qkv_bias=not latent and facts.flag("qkv_bias"),
        qk_norm=not latent and facts.flag("qk_norm"),
        ffn=facts.count("ffn_hidden_size") if dense_layers else 0,
        ffn_matrices=int(architecture.facts.get("ffn_matrices", 3)),
        dropout=bool(architecture.facts.get("dropout", False)),
        experts=facts.count("num_routed_experts") if moe else 0,
        top_k=facts.count("top_k") if moe else 0,
        expert_ffn=facts.count("moe_ffn_hidden_size") if moe else 0,
        shared_ffn=facts.count("shared_expert_ffn_hidden_size") if moe else 0,
        router_bias=moe and facts.flag("router_expert_bias"),
        expert_groups_of_token=int(architecture.facts.get("router_top_groups", 0)) if moe else 0,
    )


@dataclass(frozen=True, slots=True)
class _Facts:
    subject: str
    facts: Mapping[str, Any]

    def _get(self, fact: str) -> Any:
        value = self.facts.get(fact)
        if value is None and fact not in self.facts:
            raise UnknownFactError(self.subject, fact)
        return value

    def count(self, fact: str) -> int:
        return int(self._get(fact) or 0)

    def flag(self, fact: str) -> bool:
        return bool(self._get(fact))

    def text(self, fact: str) -> str:
        return str(self._get(fact))
