"""Attention over several sequences that lie one after another in one row, each of which sees itself alone.

Nothing is computed for padding, and no mask of tokens x tokens is made: the model's own attention runs once for every
sequence. Where samples share a prompt (see shared_prompts.py) it runs once for the prompt and once for every rectangle
of responses, which see the prompt's keys before their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlflow.backends.ray_runtime.packing import Family, MicroBatch
from rlflow.backends.ray_runtime.parallel.stages import Absent

_PREFIX = "rlflow_packed_"
_CAUSAL = ("sdpa", "rlflow")
"""Implementations that look back only, without being given a mask."""


def can_pack(decoder: Any) -> bool:
    """Whether every layer looks back at all positions, through an attention that needs no mask for it."""
    inner = str(getattr(decoder.config, "_attn_implementation", None)).removeprefix(_PREFIX)
    layers = [layer for layer in getattr(decoder, "layers", [None]) if not isinstance(layer, Absent)]
    return inner in _CAUSAL and all(
        hasattr(layer, "self_attn") and getattr(layer.self_attn, "sliding_window", None) is None for layer in layers
    )


def allow_packed(model: Any) -> None:
    """Let a model compute packed rows; what it computes for others stays the same."""
    inner = model.config._attn_implementation
    if not inner.startswith(_PREFIX):
        AttentionInterface.register(_PREFIX + inner, partial(_attention, inner))
        AttentionMaskInterface.register(_PREFIX + inner, ALL_MASK_ATTENTION_FUNCTIONS[inner])
        model.set_attn_implementation(_PREFIX + inner)


def packed_inputs(micro: MicroBatch, device: torch.device) -> dict[str, Any]:
    """What a decoder is called with beside the ids, or the hidden states, of a micro-batch."""
    if micro.families is not None:
        return _shared_inputs(micro.families, device)
    if micro.segments is None:
        return {}
    width = micro.ids.shape[1]
    positions = torch.zeros(width, dtype=torch.int64)
    lengths = torch.tensor(micro.segments)
    total = int(lengths.sum())
    positions[:total] = torch.arange(total) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    # A mask of four dimensions is taken as it is, and `_attention` makes none of it.
    return {
        "position_ids": positions[None].to(device),
        "attention_mask": torch.empty(1, 1, 0, 0, device=device),
        "segments": micro.segments,
    }


def _shared_inputs(families: tuple[Family, ...], device: torch.device) -> dict[str, Any]:
    positions = []
    masks: dict[tuple[int, int], torch.Tensor] = {}
    for family in families:
        positions.append(torch.arange(family.prompt))
        for count, width in family.blocks:
            positions.append(torch.arange(family.prompt, family.prompt + width).repeat(count))
            # Every response token sees the whole prompt, and of the responses its own up to itself.
            mask = torch.ones(width, family.prompt + width, dtype=torch.bool, device=device)
            masks[family.prompt, width] = mask.tril_(family.prompt)[None, None]
    return {
        "position_ids": torch.cat(positions)[None].to(device),
        "attention_mask": torch.empty(1, 1, 0, 0, device=device),
        "families": families,
        "family_masks": masks,
    }


def _attention(
    inner: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    segments: tuple[int, ...] | None = None,
    families: tuple[Family, ...] | None = None,
    family_masks: dict[tuple[int, int], torch.Tensor] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Query [1, heads, length, size]; `segments`: lengths of the sequences, what lies behind them is padding."""
    run = ALL_ATTENTION_FUNCTIONS[inner]
    if families is not None:
        options.pop("position_ids", None)
        assert family_masks is not None
        return _shared(partial(run, module, **options), query, key, value, families, family_masks), None
    if segments is None:
        found: tuple[torch.Tensor, Any] = run(module, query, key, value, attention_mask, **options)
        return found
    options.pop("position_ids", None)
    rest = query.shape[2] - sum(segments)
    lengths = [*segments, rest] if rest else list(segments)
    parts = zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True)
    outputs = [run(module, *part, None, **options)[0] for part in parts]
    return torch.cat(outputs, 1), None


def _shared(
    run: Callable[..., tuple[torch.Tensor, Any]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    families: tuple[Family, ...],
    masks: dict[tuple[int, int], torch.Tensor],
) -> torch.Tensor:
    """[1, length, heads, size]"""
    outputs = []
    at = 0
    for family in families:
        prompt = [tensor[:, :, at : at + family.prompt] for tensor in (query, key, value)]
        outputs.append(run(*prompt, None)[0])
        at += family.prompt
        for count, width in family.blocks:
            if not width:
                continue
            area = slice(at, at + count * width)
            own = [t[0, :, area].unflatten(1, (count, width)).transpose(0, 1) for t in (query, key, value)]
            keys, values = (
                torch.cat([before.expand(count, -1, -1, -1), behind], 2)
                for before, behind in zip(prompt[1:], own[1:], strict=True)
            )
            mixed = run(own[0], keys, values, masks[family.prompt, width])[0]
            outputs.append(mixed.reshape(1, count * width, *mixed.shape[2:]))
            at = area.stop
    return torch.cat(outputs, 1)
