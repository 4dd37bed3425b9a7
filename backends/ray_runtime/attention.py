"""Causal attention for training on short sequences, registered with transformers as `rlflow`.

torch's fused CPU attention pays off from some length on; below it, two batched matrix products and a softmax are
faster, forward and backward. Where a mask is given, or the sequence is long, or on an accelerator, torch's own runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "rlflow"
_SHORT = 64
"""tokens; measured on x86: equal at 80"""


def use_short_attention(model: PreTrainedModel) -> None:
    """Let a model that runs torch's attention choose by length; any other implementation stays as it is."""
    if model.config._attn_implementation == "sdpa" and model.device.type == "cpu":
        model.set_attn_implementation(_NAME)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Query [batch, heads, length, size], key and value with fewer heads; returns [batch, length, heads, size]."""
    batch, heads, length, size = query.shape
    kv_heads = key.shape[1]
    plain = attention_mask is None and 1 < length == key.shape[2] <= _SHORT and key.shape[-1] == value.shape[-1]
    scaling = options.get("scaling")
    if not plain or scaling is None or options.get("dropout") or not getattr(module, "is_causal", True):
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output
    group = heads // kv_heads
    # The query heads of one key head lie side by side: as more rows of one product they need no repeated keys.
    q = query.reshape(batch * kv_heads, group * length, size)
    k = key.reshape(batch * kv_heads, length, size)
    v = value.reshape(batch * kv_heads, length, size)
    future = torch.full((length, length), float("-inf"), dtype=q.dtype).triu_(1).repeat(group, 1)
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=scaling)
    mixed = torch.bmm(torch.softmax(scores, -1), v)
    return mixed.view(batch, heads, length, size).transpose(1, 2), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)
