"""Weights of tokens and of responses that `aggregate.token_weights` has no name for; sum with `aggregate.aggregate`."""

from __future__ import annotations

import torch

from rlflow.backends.ray_runtime.algorithms.rows import check_rows, row_counts


def token_sum_weights(
    lengths: torch.Tensor, *, horizon: float, total_rows: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """1 / (horizon x total_rows) for every counted token, whatever its response's length: float32 [tokens].

    Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783): the sum over tokens divided by a constant, trl's dr_grpo and verl's
    seq-mean-token-sum-norm. The constant has no default: a generation budget, never the batch's own longest row.
    `total_rows` counts the whole mini-batch over all ranks. A total of 0 gives weights of 0.
    """
    if horizon <= 0:
        raise ValueError(f"horizon must be positive, not {horizon}")
    check_rows(lengths, mask)
    scale = 1.0 / (horizon * total_rows) if total_rows else 0.0
    counted = torch.ones(int(lengths.sum()), device=lengths.device) if mask is None else (mask > 0).to(torch.float32)
    return counted * scale


def row_weights(lengths: torch.Tensor, *, total_rows: float, mask: torch.Tensor | None = None) -> torch.Tensor:
    """1 / total_rows for every response that has a counted token, else 0: float32 [rows]. For losses per response."""
    scale = 1.0 / total_rows if total_rows else 0.0
    return (row_counts(lengths, mask) > 0).to(torch.float32) * scale
