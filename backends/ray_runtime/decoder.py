"""One token at a time through a transformers model: prefill, then cached steps.

Two decoders with one interface. `GenericDecoder` calls the model's own forward and works for every causal model.
`DenseDecoder` reads the weights of the dense Llama-like models (Llama, Qwen2, Qwen3) and does the step with about
twenty tensor operations per layer: on small models the time of a step is the number of calls, not their arithmetic.

Life of a decoder: `refresh` (after weights changed) -> `prefill` -> `select` (repeat rows for a group) -> `step` ...
with `select` again whenever finished rows are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, PreTrainedModel

_DENSE = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
_FUSE_LIMIT_BYTES = 64 << 20
_FIRST_CAPACITY = 64


class Decoder(Protocol):
    """Rows [batch] of one cache. All rows are at the same position; shorter prompts are padded on the left."""

    def refresh(self) -> None:
        """Read the model's weights anew."""

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, max_new: int) -> torch.Tensor:
        """Start with left-padded prompts int64 [batch, width]; logits of the next token [batch, vocabulary]."""

    def select(self, rows: torch.Tensor) -> None:
        """Keep, repeat and reorder rows: int64 [new batch]."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token per row, int64 [batch]; logits of the next one [batch, vocabulary]."""


def make_decoder(model: PreTrainedModel) -> Decoder:
    """The fastest decoder that computes exactly this model."""
    return DenseDecoder(model) if _is_dense(model) else GenericDecoder(model)


def _is_dense(model: PreTrainedModel) -> bool:
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        type(model).__name__ in _DENSE
        and config.hidden_act == "silu"
        and kinds == {"full_attention"}
        and model.model.rotary_emb.rope_type in _STATIC_ROPE
        and all(type(m) is nn.Linear for n, m in model.named_modules() if n.endswith("_proj"))
    )


class GenericDecoder:
    """transformers' own forward, masks and cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def refresh(self) -> None:
        pass

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, max_new: int) -> torch.Tensor:
        width = ids.shape[1]
        self.mask = (torch.arange(width, device=ids.device) >= (width - lengths)[:, None]).long()
        self.positions = lengths.clone()
        self.cache = DynamicCache(config=self.model.config)
        return self._forward(ids, (self.mask.cumsum(-1) - 1).clamp(min=0))

    def select(self, rows: torch.Tensor) -> None:
        # reorder_cache rather than batch_select_indices: every kind of cache layer has it.
        self.cache.reorder_cache(rows)
        self.mask, self.positions = self.mask[rows], self.positions[rows]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.mask = F.pad(self.mask, (0, 1), value=1)
        logits = self._forward(tokens[:, None], self.positions[:, None])
        self.positions = self.positions + 1
        return logits

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


@dataclass(slots=True)
class _Layer:
    """Weights of one layer; `qkv` and `gate_up` hold one joined matrix, or the separate ones of a large model."""

    norm1: torch.Tensor
    norm2: torch.Tensor
    qkv: list[tuple[torch.Tensor, torch.Tensor | None]]
    out: nn.Linear
    gate_up: list[tuple[torch.Tensor, torch.Tensor | None]]
    down: nn.Linear
    head_norm: torch.Tensor | None
    """[heads + kv heads, head size]: scale of the normalised queries and keys (Qwen3)"""


class DenseDecoder:
    """Prefill by transformers, steps by hand over the same weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self.model = model
        self.body = model.model
        self.epsilon = float(config.rms_norm_eps)
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.size = int(getattr(config, "head_dim", None) or config.hidden_size // self.heads)
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        self.fuse = parameters <= _FUSE_LIMIT_BYTES
        self.refresh()

    def refresh(self) -> None:
        self.layers = [self._layer(layer) for layer in self.body.layers]

    def _layer(self, layer: nn.Module) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        q_norm = getattr(attention, "q_norm", None)
        head_norm = None
        if q_norm is not None:
            head_norm = torch.cat(
                [q_norm.weight.expand(self.heads, -1), attention.k_norm.weight.expand(self.kv_heads, -1)]
            )
        return _Layer(
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            self._joined([attention.q_proj, attention.k_proj, attention.v_proj]),
            attention.o_proj,
            self._joined([mlp.gate_proj, mlp.up_proj]),
            mlp.down_proj,
            head_norm,
        )

    def _joined(self, parts: list[nn.Linear]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        # One matrix product instead of three is a tenth of a small model's step. It costs a copy of these weights,
        # which a large model neither needs nor can afford.
        if not self.fuse:
            return [(part.weight, part.bias) for part in parts]
        bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        return [(torch.cat([part.weight for part in parts]), bias)]

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, max_new: int) -> torch.Tensor:
        width = ids.shape[1]
        pads = width - lengths
        padded = bool((pads > 0).any())
        slots = torch.arange(width, device=ids.device)
        mask = None
        positions = None
        if padded:
            real = slots >= pads[:, None]
            positions = (slots - pads[:, None]).clamp(min=0)
            # A padding slot sees itself: a row of the mask without any True would be NaN and spread.
            itself = slots[:, None] == slots
            mask = (((slots[:, None] >= slots) & real[:, None, :]) | itself)[:, None]
        cache = DynamicCache(config=self.model.config)
        hidden = self.body(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1]
        self.length = width
        self.total = width + max_new
        self.keys = [layer.keys for layer in cache.layers]
        self.values = [layer.values for layer in cache.layers]
        self.capacity = width
        self.pads = pads
        self.padded = padded
        self.bias: torch.Tensor | None = None
        self._rotary(hidden)
        logits: torch.Tensor = self.model.lm_head(hidden)
        return logits

    def _rotary(self, like: torch.Tensor) -> None:
        """Rotary factors by position with the head norm's scale and the attention scale multiplied in.

        The rotation is y * cos + roll(y) * sin with the first half of sin negated; y's elementwise scale moves into
        the tables once per generation instead of once per token.
        """
        slots = torch.arange(self.total, device=like.device)[None]
        cos, sin = (table[0].float() for table in self.body.rotary_emb(like, slots))
        half = self.size // 2
        sin = torch.cat([-sin[:, :half], sin[:, half:]], -1)
        scale = torch.ones(self.heads + self.kv_heads, self.size, device=like.device)
        scale[: self.heads] = self.body.layers[0].self_attn.scaling
        self.tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in self.layers:
            if layer.head_norm is None:
                if not self.tables:
                    self.tables.append(((cos[:, None] * scale), (sin[:, None] * scale)))
                else:
                    self.tables.append(self.tables[0])
                continue
            w = layer.head_norm.float()
            self.tables.append((cos[:, None] * (w * scale), sin[:, None] * (w.roll(half, -1) * scale)))

    def select(self, rows: torch.Tensor) -> None:
        if self.capacity == self.length:
            self._grow(rows)
            return
        self.keys = [keys.index_select(0, rows) for keys in self.keys]
        self.values = [values.index_select(0, rows) for values in self.values]
        self._pad_bias(rows)

    def _grow(self, rows: torch.Tensor | None = None) -> None:
        """Make room for more tokens, by doubling; selects rows on the way so that repeating a group copies once."""
        self.capacity = min(self.total, max(2 * self.length, self.length + _FIRST_CAPACITY))
        for tensors in (self.keys, self.values):
            for index, old in enumerate(tensors):
                batch = old.shape[0] if rows is None else len(rows)
                new = old.new_empty(batch, old.shape[1], self.capacity, old.shape[3])
                new[:, :, : self.length] = old[:, :, : self.length] if rows is None else old[rows, :, : self.length]
                tensors[index] = new
        self._pad_bias(rows)

    def _pad_bias(self, rows: torch.Tensor | None) -> None:
        """-inf on the padding of each (row, kv head), in the scores' dtype; None when no prompt is padded."""
        if rows is not None:
            self.pads = self.pads[rows]
        if self.padded:
            hidden = torch.arange(self.capacity, device=self.pads.device) < self.pads[:, None]
            bias = torch.zeros(hidden.shape, dtype=self.keys[0].dtype, device=hidden.device)
            bias.masked_fill_(hidden, float("-inf"))
            self.bias = bias.repeat_interleave(self.kv_heads, 0)[:, None]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.length == self.capacity:
            self._grow()
        heads, kv_heads, size, slot = self.heads, self.kv_heads, self.size, self.length
        batch, end, half = len(tokens), slot + 1, size // 2
        rotated = heads + kv_heads
        x = F.embedding(tokens, self.body.embed_tokens.weight)
        # Left padding moves a row's positions, but rotary attention sees only differences of positions inside a row,
        # and the padded prefill counted from the first real token: so the row's position is slot - pad.
        position = (slot - self.pads) if self.padded else slot
        bias = self.bias[:, :, :end] if self.bias is not None else None
        for layer, keys, values, (cos, sin) in zip(self.layers, self.keys, self.values, self.tables, strict=True):
            y = _rms(x, self.epsilon, layer.norm1)
            qkv = _linear(y, layer.qkv).view(batch, rotated + kv_heads, size)
            qk = qkv[:, :rotated]
            if layer.head_norm is not None:
                qk = _rms(qk, self.epsilon)
            qk = torch.addcmul(qk * cos[position], qk.roll(half, -1), sin[position]).to(x.dtype)
            keys[:, :, slot] = qk[:, heads:]
            values[:, :, slot] = qkv[:, rotated:]
            q = qk[:, :heads].reshape(batch * kv_heads, -1, size)
            k = keys.view(batch * kv_heads, -1, size)[:, :end].transpose(1, 2)
            v = values.view(batch * kv_heads, -1, size)[:, :end]
            scores = torch.bmm(q, k) if bias is None else torch.baddbmm(bias, q, k)
            mixed = torch.bmm(torch.softmax(scores, -1), v).view(batch, heads * size)
            x = x + F.linear(mixed, layer.out.weight, layer.out.bias)
            y = _linear(_rms(x, self.epsilon, layer.norm2), layer.gate_up)
            gate, up = y.chunk(2, -1)
            x = x + F.linear(F.silu(gate).mul_(up), layer.down.weight, layer.down.bias)
        self.length = end
        logits: torch.Tensor = self.model.lm_head(_rms(x, self.epsilon, self.body.norm.weight))
        return logits


def _linear(x: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor | None]]) -> torch.Tensor:
    if len(parts) == 1:
        return F.linear(x, *parts[0])
    return torch.cat([F.linear(x, weight, bias) for weight, bias in parts], -1)


def _rms(x: torch.Tensor, epsilon: float, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Root-mean-square norm over the last axis (Zhang & Sennrich 2019), in fp32 as the models do it."""
    y = x.float()
    norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1.0 / y.shape[-1]).add_(epsilon).rsqrt_()
    y = (y * scale).to(x.dtype)
    return y if weight is None else y.mul_(weight)
