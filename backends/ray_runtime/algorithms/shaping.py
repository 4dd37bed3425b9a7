"""Rewards before they become advantages: length penalties, and rewards laid onto tokens."""

from __future__ import annotations

import numpy as np
import torch

from rlflow.backends.ray_runtime.algorithms.rows import blank, check_rows, padded, row_sums


def soft_overlong_penalty(lengths: np.ndarray, *, limit: int, buffer: int, scale: float = 1.0) -> np.ndarray:
    """0 up to limit - buffer tokens, then falling linearly to -1 at `limit`, -1 beyond; times `scale`.

    DAPO, Yu et al. 2025 (arXiv 2503.14476) eq. 13, to be added to the reward. `lengths` int [samples] in tokens;
    float64 [samples]. `buffer` = 0 leaves a step at `limit`.
    """
    if not 0 <= buffer <= limit:
        raise ValueError(f"the buffer of {buffer} tokens must lie between 0 and the limit of {limit} tokens")
    over = np.asarray(lengths, dtype=np.float64) - (limit - buffer)
    steps = np.where(over > 0, 1.0, 0.0) if buffer == 0 else np.clip(over / buffer, 0.0, 1.0)
    return -scale * steps


def overlong_filter(truncated: np.ndarray) -> np.ndarray:
    """bool [samples]: False for responses cut off at the limit, which then enter no loss term.

    DAPO (arXiv 2503.14476) section 3.4, overlong filtering. Whether they enter the group's mean is the flow's choice:
    set their reward to NaN for no.
    """
    return ~np.asarray(truncated, dtype=bool)


def score_at_end(scores: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """[tokens]: each row's score at its last counted token, 0 elsewhere. A row without one loses its score.

    `scores` float [rows], `lengths` int64 [rows], `mask` [tokens], 0 = not counted.
    """
    check_rows(lengths, mask)
    tokens = int(lengths.sum())
    counted = torch.ones(tokens, device=lengths.device) if mask is None else (mask > 0).to(torch.float32)
    matrix = padded(counted, lengths)
    steps = torch.arange(1, matrix.shape[1] + 1, device=lengths.device)
    last = (matrix * steps).amax(1).to(torch.int64) if matrix.shape[1] else torch.zeros_like(lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    rows = last > 0
    out = scores.new_zeros(tokens)
    out[(starts + last - 1)[rows]] = scores[rows]
    return out


def with_kl_penalty(
    rewards: torch.Tensor, kl: torch.Tensor, *, coefficient: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """reward - coefficient x KL at counted tokens; 0 at the others, whose KL must not reach earlier returns.

    Ouyang et al. 2022 (arXiv 2203.02155) eq. 2, token by token. `rewards`, `kl` [tokens]; `kl` is k1,
    log-prob minus the reference's, in the paper.
    """
    return blank(rewards - coefficient * kl.detach(), mask)


def reward_with_sequence_kl(
    scores: torch.Tensor,
    kl: torch.Tensor,
    lengths: torch.Tensor,
    *,
    coefficient: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows]: score minus coefficient x the row's sum of KL over counted tokens (RLOO, arXiv 2402.14740)."""
    return scores - coefficient * row_sums(kl.detach().to(scores.dtype), lengths, mask)
