"""One token at a time through a transformers model: prefill, then cached steps.

Two decoders with one interface. `GenericDecoder` calls the model's own forward and works for every causal model.
`DenseDecoder` reads the weights of the dense Llama-like models (Llama, Qwen2, Qwen3) and does the step with about
twenty tensor operations per layer: on small models the time of a step is the number of calls, not their arithmetic.

Life of a decoder: `refresh` (after weights changed) -> `prefill` -> `select` (repeat rows for a group) -> `step` ...
with `select` again whenever finished rows are dropped. In a conversation rows whose turn is over are put aside with
`park`; `resume` goes on with them when they have more to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from rlflow.backends.ray_runtime.generic_decoder import (
    Decoder,
    GenericDecoder,
    Parked,
    bytes_of,
    causal_mask,
    joined,
)
from rlflow.backends.ray_runtime.tensor_parallel import RowParallel, add_up, group_of

__all__ = ["Decoder", "DenseDecoder", "GenericDecoder", "Parked", "make_decoder"]

_DENSE = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
_FUSE_LIMIT_BYTES = 64 << 20
_FIRST_CAPACITY = 64

_Affine: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Weight and bias of a linear layer."""
_Table: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
"""[heads + kv heads, head size] by position."""


def make_decoder(model: PreTrainedModel) -> Decoder:
    """The fastest decoder that computes exactly this model. On an NPU the model itself runs fused operators."""
    return DenseDecoder(model) if model.device.type != "npu" and _is_dense(model) else GenericDecoder(model)


def _is_dense(model: PreTrainedModel) -> bool:
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        type(model).__name__ in _DENSE
        and config.hidden_act == "silu"
        and kinds == {"full_attention"}
        and model.model.rotary_emb.rope_type in _STATIC_ROPE
        and all(type(m) in (nn.Linear, RowParallel) for n, m in model.named_modules() if n.endswith("_proj"))
    )


@dataclass(slots=True)
class _Layer:
    """Weights of one layer; `qkv` and `gate_up` hold one joined matrix, or the separate ones of a large model."""

    norm1: torch.Tensor
    norm2: torch.Tensor
    qkv: list[_Affine]
    out: _Affine
    gate_up: list[_Affine]
    down: _Affine
    head_norm: torch.Tensor | None
    """[heads + kv heads, head size]: scale of the normalised queries and keys (Qwen3)"""


@dataclass(slots=True)
class _View:
    """One layer's cache as a step uses it."""

    key_slots: tuple[torch.Tensor, ...]
    """[batch, kv heads, head size] per position, to write"""
    value_slots: tuple[torch.Tensor, ...]
    keys: torch.Tensor
    """[batch x kv heads, head size, capacity], to read"""
    values: torch.Tensor
    """[batch x kv heads, capacity, head size]"""


class DenseDecoder:
    """Prefill by transformers, steps by hand over the same weights.

    Of a model in parts (see local_weights.py) it has the part's heads and columns; all ranks call together.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self.model = model
        self.body = model.model
        self.group = group_of(model)
        self.epsilon = torch.tensor(float(config.rms_norm_eps), device=model.device)
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.size = int(getattr(config, "head_dim", None) or config.hidden_size // self.heads)
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        self.fuse = parameters <= _FUSE_LIMIT_BYTES
        self.parked: WeakSet[Parked] = WeakSet()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.cache_peak = 0
        self.drop()
        self.refresh()

    @torch.no_grad()  # type: ignore[untyped-decorator]
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
            (attention.o_proj.weight, attention.o_proj.bias),
            self._joined([mlp.gate_proj, mlp.up_proj]),
            (mlp.down_proj.weight, mlp.down_proj.bias),
            head_norm,
        )

    def drop(self) -> None:
        self._note()
        self.keys, self.values = [], []
        self.views: list[_View] = []
        self.tables: list[tuple[_Table, _Table]] = []
        self.bias: torch.Tensor | None = None
        for part in self.parked:
            part.drop()

    def drop_weights(self) -> None:
        self.layers = []

    def copied_bytes(self) -> int:
        joined = [part for layer in self.layers for parts in (layer.qkv, layer.gate_up) for part in parts]
        return bytes_of(weight for weight, _ in joined) if self.fuse else 0

    def cache_bytes(self) -> int:
        parked = [tensor for part in self.parked for tensor in (*part.keys, *part.values)]
        return bytes_of((*self.keys, *self.values, *parked))

    def _note(self) -> None:
        """Before rows leave: between two such moments the cache only grows."""
        self.cache_peak = max(self.cache_peak, self.cache_bytes())

    def _joined(self, parts: list[nn.Linear]) -> list[_Affine]:
        # One matrix product instead of three is a tenth of a small model's step. It costs a copy of these weights,
        # which a large model neither needs nor can afford.
        if not self.fuse:
            return [(part.weight, part.bias) for part in parts]
        bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        return [(torch.cat([part.weight for part in parts]), bias)]

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, max_new: int) -> torch.Tensor:
        width = ids.shape[1]
        self.pads = width - lengths
        self.padded = bool((self.pads > 0).any())
        mask = positions = None
        if self.padded:
            slots = torch.arange(width, device=ids.device)
            mask, positions = causal_mask(slots, slots, self.pads), (slots - self.pads[:, None]).clamp(min=0)
        return self._read(ids, mask, positions, DynamicCache(config=self.model.config), max_new)

    def park(self, rows: torch.Tensor) -> Parked:
        whole = [[tensor[:, :, : self.length] for tensor in tensors] for tensors in (self.keys, self.values)]
        part = Parked(whole[0], whole[1], self.pads).select(rows)
        self.parked.add(part)
        self._note()
        return part

    def resume(
        self, parked: Sequence[Parked], ids: torch.Tensor, lengths: torch.Tensor, new: int, max_new: int
    ) -> torch.Tensor:
        if any(part.dropped for part in parked):
            return self.prefill(ids, lengths, max_new)
        first = ids.shape[1] - new
        self.pads = ids.shape[1] - lengths
        self.padded = bool((self.pads > 0).any())
        # A row with fewer new tokens computes its last old ones again: no row has a gap, all end at one position.
        cache = DynamicCache(config=self.model.config)
        if first:
            for index, (keys, values) in enumerate(joined(parked, self.pads, first)):
                cache.update(keys, values, index)
        slots = torch.arange(ids.shape[1], device=ids.device)
        mask = causal_mask(slots[first:], slots, self.pads)
        positions = (slots[first:] - self.pads[:, None]).clamp(min=0)
        return self._read(ids[:, first:], mask, positions, cache, max_new)

    def _read(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        cache: DynamicCache,
        max_new: int,
    ) -> torch.Tensor:
        """Many tokens at once behind what is in `cache`, through the model's own forward; its cache becomes ours."""
        hidden = self.body(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1]
        self._note()
        width: int = cache.layers[0].keys.shape[2]
        self.length = self.capacity = width
        self.total = width + max_new
        self.keys = [layer.keys for layer in cache.layers]
        self.values = [layer.values for layer in cache.layers]
        self.bias = None
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
        self.tables = []
        for layer in self.layers:
            if layer.head_norm is None and self.tables:
                self.tables.append(self.tables[0])
                continue
            w = torch.ones_like(scale) if layer.head_norm is None else layer.head_norm.float()
            pair = cos[:, None] * (w * scale), sin[:, None] * (w.roll(half, -1) * scale)
            # Rows at different positions gather from the table; a common position picks one entry of a tuple.
            self.tables.append(pair if self.padded else (pair[0].unbind(0), pair[1].unbind(0)))

    def select(self, rows: torch.Tensor) -> None:
        self._note()
        if self.capacity == self.length:
            self._grow(rows)
            return
        self.keys = [keys.index_select(0, rows) for keys in self.keys]
        self.values = [values.index_select(0, rows) for values in self.values]
        self._make_views(rows)

    def _grow(self, rows: torch.Tensor | None = None) -> None:
        """Make room for more tokens, by doubling; selects rows on the way so that repeating a group copies once."""
        self.capacity = min(self.total, max(2 * self.length, self.length + _FIRST_CAPACITY))
        for tensors in (self.keys, self.values):
            for index, old in enumerate(tensors):
                batch = old.shape[0] if rows is None else len(rows)
                new = old.new_empty(batch, old.shape[1], self.capacity, old.shape[3])
                new[:, :, : self.length] = old[:, :, : self.length] if rows is None else old[rows, :, : self.length]
                tensors[index] = new
        self._make_views(rows)

    def _make_views(self, rows: torch.Tensor | None) -> None:
        """Views of the cache that every step needs, and the mask of the padding: both change with rows and capacity."""
        batch, flat = self.keys[0].shape[0], (-1, self.capacity, self.size)
        self.batch = batch
        self.views = [
            _View(k.unbind(2), v.unbind(2), k.view(flat).transpose(1, 2), v.view(flat))
            for k, v in zip(self.keys, self.values, strict=True)
        ]
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
        end, half = slot + 1, size // 2
        rotated = heads + kv_heads
        width = heads * size
        # A row's positions count from its first real token, as in the prefill.
        position = (slot - self.pads) if self.padded else slot
        bias = self.bias[:, :, :end] if self.bias is not None else None
        group = self.group
        x = F.embedding(tokens, self.body.embed_tokens.weight) if group is None else self.body.embed_tokens(tokens)
        for layer, view, (cos, sin) in zip(self.layers, self.views, self.tables, strict=True):
            y = self._norm(x, layer.norm1)
            qk, v = _linear(y, layer.qkv).view(-1, rotated + kv_heads, size).split((rotated, kv_heads), 1)
            if layer.head_norm is not None:
                qk = self._norm(qk)
            qk = torch.addcmul(qk * cos[position], qk.roll(half, -1), sin[position]).to(x.dtype)
            q, k = qk.split((heads, kv_heads), 1)
            view.key_slots[slot].copy_(k)
            view.value_slots[slot].copy_(v)
            q = q.reshape(-1, heads // kv_heads, size)
            keys, values = view.keys[:, :, :end], view.values[:, :end]
            # bmm, as torch's fused attention is several times slower for one query on a CPU
            scores = torch.bmm(q, keys) if bias is None else torch.baddbmm(bias, q, keys)
            mixed = torch.bmm(torch.softmax(scores, -1), values).view(-1, width)
            out = F.linear(mixed, *layer.out)
            x = x + (out if group is None else add_up(out, group))
            gate, up = _linear(self._norm(x, layer.norm2), layer.gate_up).chunk(2, -1)
            out = F.linear(F.silu(gate).mul_(up), *layer.down)
            x = x + (out if group is None else add_up(out, group))
        self.length = end
        logits: torch.Tensor = self.model.lm_head(self._norm(x, self.body.norm.weight))
        return logits

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Root-mean-square norm over the last axis (Zhang & Sennrich 2019), in fp32 as the models do it."""
        y = x.float()
        norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        scale = torch.addcmul(self.epsilon, norm, norm, value=1.0 / y.shape[-1]).rsqrt_()
        y = (y * scale).to(x.dtype)
        return y if weight is None else y.mul_(weight)


def _linear(x: torch.Tensor, parts: list[_Affine]) -> torch.Tensor:
    if len(parts) == 1:
        return F.linear(x, *parts[0])
    return torch.cat([F.linear(x, weight, bias) for weight, bias in parts], -1)
