"""REINFORCE++: critic-free advantages normalised over the whole batch, Hu et al. 2025 (arXiv 2501.03262)."""

from __future__ import annotations

import numpy as np
import torch

from rlflow.backends.ray_runtime.algorithms.gae import Clock, discounted_returns
from rlflow.backends.ray_runtime.algorithms.group import valid_group_normalize
from rlflow.backends.ray_runtime.algorithms.moments import Moments, whiten


def reinforce_pp(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    *,
    gamma: float = 1.0,
    mask: torch.Tensor | None = None,
    over: Moments | None = None,
    clock: Clock = "all",
) -> torch.Tensor:
    """The return from each token on, whitened over all counted tokens of the batch: [tokens].

    Args: `rewards` [tokens]: the score at the last token (`score_at_end`), minus the KL penalty
    (`with_kl_penalty`); `mask` [tokens], 0 = not counted; `over`: see `whiten`.
    """
    return whiten(discounted_returns(rewards, lengths, gamma=gamma, mask=mask, clock=clock), mask, over=over)


def centred_per_token(
    rewards: np.ndarray, groups: np.ndarray, lengths: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reward minus its group's mean at every token, float32 [tokens], and the mask without samples that have no reward.

    What `reinforce_pp_baseline` whitens; a rank that holds a part of the batch takes `moments` of it first.
    """
    found = valid_group_normalize(rewards, groups, std=False, epsilon=0.0)
    sizes = lengths.cpu()
    spread = torch.repeat_interleave(torch.from_numpy(found.values), sizes).to(torch.float32)
    counted = torch.repeat_interleave(torch.from_numpy(found.counted), sizes)
    return spread, counted if mask is None else counted & (mask.cpu() > 0)


def reinforce_pp_baseline(
    rewards: np.ndarray,
    groups: np.ndarray,
    lengths: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    over: Moments | None = None,
) -> torch.Tensor:
    """Reward minus its group's mean, then whitened over all counted tokens of the batch: float32 [tokens].

    Long responses weigh more in the batch's mean and deviation, as in the paper's token-level normalisation and verl.
    A group of one has a centred reward of 0 (verl keeps the raw reward).
    """
    spread, counted = centred_per_token(rewards, groups, lengths, mask)
    return whiten(spread, counted, over=over)
