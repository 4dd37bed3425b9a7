"""Every tensor of a model under one canonical name, with its shape and the rule by which parallelism divides it.

Names are those of Hugging Face checkpoints, with the global layer index; the experts of a layer are one tensor per
matrix, [experts, ...]. A matrix is [out, in]. What a model has follows from the facts of its architecture, not from its
family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Any

from rlflow.reshard.boxes import Shape
from rlflow.reshard.errors import ReshardError
from rlflow.values import dataclass

if TYPE_CHECKING:
    from rlflow.cluster.presets.architecture import Architecture

NORM_NAMES = {
    1: ("input_layernorm",),
    2: ("input_layernorm", "post_attention_layernorm"),
    4: ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
}
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Rule(StrEnum):
    """How tensor parallelism divides a tensor. `dim` and `units` of the spec say where, and into what at most."""

    REPLICATE = "replicate"
    SHARD = "shard"
    KV = "kv"
    """As SHARD; with more ranks than heads every head is held by so many ranks."""
    VOCAB = "vocab"
    """As SHARD, after padding."""
    EXPERT = "expert"
    """Dimension 0 by expert parallelism, `dim` by the tensor parallelism of experts."""


class Home(StrEnum):
    """Which pipeline stages hold a tensor."""

    EMBEDDING = "embedding"
    """The first, and the last where the head is tied to it or multi-token prediction reads it."""
    LAYER = "layer"
    HEAD = "head"
    """The last."""
    MTP = "mtp"
    """The last; not at all on a side without multi-token prediction."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """`units` equal units along `dim` are never cut: heads, or rows and columns."""

    name: str
    shape: Shape
    rule: Rule = Rule.REPLICATE
    dim: int = 0
    units: int = 0
    home: Home = Home.LAYER
    layer: int | None = None
    fused: str = ""
    """`qkv` or `gate_up` where runtimes keep several such tensors as one."""

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def structure(self) -> tuple[Shape, Rule, int, int]:
        """Tensors of equal structure are divided equally."""
        return self.shape, self.rule, self.dim, self.units


@dataclass(frozen=True, slots=True)
class Catalogue:
    """In the order in which a forward pass reads them; names are unique."""

    tensors: tuple[TensorSpec, ...]
    layers: int
    tied: bool = False
    by_name: Mapping[str, TensorSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts = Counter(spec.name for spec in self.tensors)
        doubled = [name for name, count in counts.items() if count > 1]
        if doubled:
            raise ReshardError(f"{name} is in the catalogue {counts[name]} times" for name in doubled)
        object.__setattr__(self, "by_name", {spec.name: spec for spec in self.tensors})

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __getitem__(self, name: str) -> TensorSpec:
        return self.by_name[name]

    @property
    def elements(self) -> int:
        return sum(spec.elements for spec in self.tensors)

    @property
    def has_mtp(self) -> bool:
        return any(spec.home is Home.MTP for spec in self.tensors)

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 for a dense model."""
        return max((spec.shape[0] for spec in self.tensors if spec.rule is Rule.EXPERT), default=0)


def catalogue(architecture: Architecture, *, mtp: bool = True) -> Catalogue:
    """All tensors of a model; `mtp` False leaves the multi-token prediction modules out.

    Their elements sum to `architecture.params()`, with `params_mtp` added where the modules are in. ReshardError where
    the facts describe something that has no rule here.
    """
    facts = architecture.facts
    if facts["attention"] not in ("gqa", "mla"):
        raise ReshardError(f"{architecture.name}: no sharding rules for attention {facts['attention']!r}")
    if facts["norms_per_layer"] not in NORM_NAMES:
        known = ", ".join(map(str, NORM_NAMES))
        raise ReshardError(f"{architecture.name}: {facts['norms_per_layer']} norms per layer (known: {known})")
    hidden, vocabulary = architecture.hidden_size, int(facts["vocab_size"])
    layers = architecture.num_layers
    embedding = TensorSpec(EMBEDDING, (vocabulary, hidden), Rule.VOCAB, units=vocabulary, home=Home.EMBEDDING)
    found = [embedding]
    dense = _layer_tensors(facts, moe=False) if architecture.num_dense_layers else []
    sparse = _layer_tensors(facts, moe=True) if architecture.num_dense_layers < layers else []
    for layer in range(layers):
        found += _at(layer, dense if layer < architecture.num_dense_layers else sparse)
    found.append(TensorSpec("model.norm.weight", (hidden,), home=Home.HEAD))
    if not facts["tie_word_embeddings"]:
        found.append(TensorSpec(HEAD, (vocabulary, hidden), Rule.VOCAB, units=vocabulary, home=Home.HEAD))
    if mtp:
        for layer in range(layers, layers + int(facts.get("num_mtp_layers", 0))):
            found += _mtp(facts, layer)
    return Catalogue(tuple(found), layers, bool(facts["tie_word_embeddings"]))


def _at(layer: int, specs: list[TensorSpec], home: Home = Home.LAYER) -> list[TensorSpec]:
    """The tensors of a layer under their full names."""
    index = layer if home is Home.LAYER else None
    return [replace(s, name=f"model.layers.{layer}.{s.name}", home=home, layer=index) for s in specs]


def _mtp(facts: Mapping[str, Any], layer: int) -> list[TensorSpec]:
    """A layer, the norms of its two inputs, the projection that joins them, and the norm before the shared head."""
    hidden = int(facts["hidden_size"])
    extra = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "shared_head.norm": (hidden,)}
    specs = _layer_tensors(facts, moe=facts["kind"] == "moe")
    specs += [TensorSpec(f"{name}.weight", shape) for name, shape in extra.items()]
    return _at(layer, specs, Home.MTP)


def _layer_tensors(facts: Mapping[str, Any], *, moe: bool) -> list[TensorSpec]:
    """Of one layer, names without the prefix."""
    hidden = int(facts["hidden_size"])
    norms = [TensorSpec(f"{name}.weight", (hidden,)) for name in NORM_NAMES[facts["norms_per_layer"]]]
    attention = _latent_attention(facts) if facts["attention"] == "mla" else _grouped_attention(facts)
    feed_forward = _experts(facts) if moe else _gated("mlp", hidden, int(facts["ffn_hidden_size"]))
    return [norms[0], *attention, *norms[1:], *feed_forward]


def _columns(name: str, out: int, inner: int, units: int = 0, fused: str = "") -> TensorSpec:
    return TensorSpec(name, (out, inner), Rule.SHARD, 0, units or out, fused=fused)


def _rows(name: str, out: int, inner: int, units: int = 0) -> TensorSpec:
    return TensorSpec(name, (out, inner), Rule.SHARD, 1, units or inner)


def _grouped_attention(facts: Mapping[str, Any]) -> list[TensorSpec]:
    hidden, heads, kv_heads = (int(facts[k]) for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head = int(facts["head_dim"])
    at = "self_attn."
    found = [
        _columns(at + "q_proj.weight", heads * head, hidden, heads, "qkv"),
        TensorSpec(at + "k_proj.weight", (kv_heads * head, hidden), Rule.KV, 0, kv_heads, fused="qkv"),
        TensorSpec(at + "v_proj.weight", (kv_heads * head, hidden), Rule.KV, 0, kv_heads, fused="qkv"),
    ]
    if facts["qkv_bias"]:
        found += [
            TensorSpec(s.name.replace(".weight", ".bias"), s.shape[:1], s.rule, 0, s.units, fused=s.fused)
            for s in found
        ]
    found.append(_rows(at + "o_proj.weight", hidden, heads * head, heads))
    if facts["qk_norm"]:
        found += [TensorSpec(f"{at}{name}.weight", (head,)) for name in ("q_norm", "k_norm")]
    return found


def _latent_attention(facts: Mapping[str, Any]) -> list[TensorSpec]:
    """Multi-head latent attention: the down-projections are replicated, the up-projections cut by head."""
    hidden, heads, q_rank, kv_rank = (
        int(facts[k]) for k in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = (int(facts[k]) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    at = "self_attn."
    return [
        TensorSpec(at + "q_a_proj.weight", (q_rank, hidden)),
        TensorSpec(at + "q_a_layernorm.weight", (q_rank,)),
        _columns(at + "q_b_proj.weight", heads * (nope + rope), q_rank, heads),
        TensorSpec(at + "kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)),
        TensorSpec(at + "kv_a_layernorm.weight", (kv_rank,)),
        _columns(at + "kv_b_proj.weight", heads * (nope + value), kv_rank, heads),
        _rows(at + "o_proj.weight", hidden, heads * value, heads),
    ]


def _gated(prefix: str, hidden: int, inner: int) -> list[TensorSpec]:
    return [
        _columns(f"{prefix}.gate_proj.weight", inner, hidden, fused="gate_up"),
        _columns(f"{prefix}.up_proj.weight", inner, hidden, fused="gate_up"),
        _rows(f"{prefix}.down_proj.weight", hidden, inner),
    ]


def _experts(facts: Mapping[str, Any]) -> list[TensorSpec]:
    hidden, experts, inner = (int(facts[k]) for k in ("hidden_size", "num_routed_experts", "moe_ffn_hidden_size"))
    at = "mlp.experts."
    found = [TensorSpec("mlp.gate.weight", (experts, hidden))]
    if facts["router_expert_bias"]:
        found.append(TensorSpec("mlp.gate.e_score_correction_bias", (experts,)))
    found += [
        TensorSpec(at + "gate_proj.weight", (experts, inner, hidden), Rule.EXPERT, 1, inner, fused="gate_up"),
        TensorSpec(at + "up_proj.weight", (experts, inner, hidden), Rule.EXPERT, 1, inner, fused="gate_up"),
        TensorSpec(at + "down_proj.weight", (experts, hidden, inner), Rule.EXPERT, 2, inner),
    ]
    shared = int(facts["shared_expert_ffn_hidden_size"])
    return found + (_gated("mlp.shared_experts", hidden, shared) if shared else [])
