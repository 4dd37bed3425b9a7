"""Learning from pairs: a better and a worse response to one prompt."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from rlflow.backends.ray_runtime.algorithms.group import valid_groups


class PreferenceLoss(NamedTuple):
    """All [pairs]; only `loss` carries a gradient."""

    loss: torch.Tensor
    chosen_reward: torch.Tensor
    """beta x (log-prob - reference's) of the chosen response"""
    rejected_reward: torch.Tensor


class Pairs(NamedTuple):
    """Sample numbers of each pair, int64 [pairs], in the order of their groups' labels."""

    chosen: np.ndarray
    rejected: np.ndarray
    skipped_groups: int
    """groups without two different rewards"""


def dpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    chosen_reference: torch.Tensor,
    rejected_reference: torch.Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> PreferenceLoss:
    """-log sigmoid(beta x margin); Rafailov et al. 2023 (arXiv 2305.18290) eq. 7.

    `label_smoothing` e: (1 - e) of it and e of the flipped pair's, conservative DPO (Mitchell 2023). All four
    [pairs]: log-probs of the whole response, `rows.row_sums` of its tokens.
    """
    better, worse = chosen - chosen_reference.detach(), rejected - rejected_reference.detach()
    margin = beta * (better - worse)
    loss = -(1.0 - label_smoothing) * logsigmoid(margin)
    if label_smoothing:
        loss = loss - label_smoothing * logsigmoid(-margin)
    return PreferenceLoss(loss, beta * better.detach(), beta * worse.detach())


def ipo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    chosen_reference: torch.Tensor,
    rejected_reference: torch.Tensor,
    *,
    beta: float,
) -> PreferenceLoss:
    """(margin - 1 / (2 beta))^2; Azar et al. 2023 (arXiv 2310.12036) eq. 17, beta is the paper's tau.

    Pass `rows.row_sums` for the paper's text, `rows.row_means` for what its authors ran and trl does.
    """
    better, worse = chosen - chosen_reference.detach(), rejected - rejected_reference.detach()
    loss = (better - worse - 0.5 / beta).square()
    return PreferenceLoss(loss, beta * better.detach(), beta * worse.detach())


def best_worst_pairs(rewards: np.ndarray, groups: np.ndarray, keys: np.ndarray | None = None) -> Pairs:
    """The best and the worst sample of every group; a group whose rewards are all equal is skipped.

    Online DPO, Guo et al. 2024 (arXiv 2402.04792), with rewards as the judge. Of several equally good samples the one
    with the lowest key is taken, so that with unique `keys` (a sample's number) the order of rows does not matter;
    default: the position. A NaN reward takes no part.
    """
    values = np.asarray(rewards, dtype=np.float64)
    ranks = np.arange(len(values)) if keys is None else np.asarray(keys)
    chosen: list[int] = []
    rejected: list[int] = []
    skipped = 0
    for _, valid in valid_groups(rewards, groups):
        if not valid.size or values[valid].min() == values[valid].max():
            skipped += 1
            continue
        by_key = valid[np.argsort(ranks[valid], kind="stable")]
        chosen.append(int(by_key[np.argmax(values[by_key])]))
        rejected.append(int(by_key[np.argmin(values[by_key])]))
    return Pairs(np.asarray(chosen, dtype=np.int64), np.asarray(rejected, dtype=np.int64), skipped)
