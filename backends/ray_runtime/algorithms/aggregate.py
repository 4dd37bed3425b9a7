"""From one value per token to one number per mini-batch.

Aggregation is a weighted sum whose weights are fixed before any micro-batch is formed: the denominators are those of
the whole mini-batch over all ranks. So the sum over micro-batches and ranks is the same number however they are cut.
"""

from __future__ import annotations

from typing import Literal

import torch

Aggregate = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


def token_weights(
    lengths: torch.Tensor, how: Aggregate, *, total_tokens: float, total_rows: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Weight of every token in the loss: float32 [tokens of these rows].

    token_mean: 1 / total_tokens (DAPO, arXiv 2503.14476 eq. 8).
    seq_mean_token_mean: 1 / (own row's tokens x total_rows) (GRPO, arXiv 2402.03300 eq. 3).
    seq_mean_token_sum: 1 / total_rows (Dr. GRPO, arXiv 2503.20783, up to a constant).

    Args: `lengths` int64 [rows] of the rows at hand; `total_tokens` (unmasked) and `total_rows` of the whole
    mini-batch over all ranks; `mask` float or bool [tokens], 0 = not counted. A total of 0 gives weights of 0.
    """
    device = lengths.device
    tokens = int(lengths.sum())
    counted = torch.ones(tokens, device=device) if mask is None else mask.to(torch.float32)
    if how == "token_mean":
        return counted * (1.0 / total_tokens if total_tokens else 0.0)
    per_row = 1.0 / total_rows if total_rows else 0.0
    if how == "seq_mean_token_sum":
        return counted * per_row
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    own = torch.zeros(len(lengths), device=device).index_add_(0, rows, counted)
    return counted * (per_row / own.clamp(min=1.0))[rows]


def aggregate(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum, a scalar. A token of weight 0 counts as 0 even when its value is not finite."""
    return torch.where(weights > 0, values * weights, torch.zeros_like(values)).sum()
