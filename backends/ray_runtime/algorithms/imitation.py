"""Supervised learning on responses: all of them, or the best of those that were sampled."""

from __future__ import annotations

import numpy as np
import torch

from rlflow.backends.ray_runtime.algorithms.group import valid_groups


def nll(logp: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood, [tokens] -> [tokens]; token_mean of it is the usual fine-tuning loss."""
    return -logp


def best_of_n(
    rewards: np.ndarray,
    groups: np.ndarray,
    *,
    keep: int = 1,
    at_least: float | None = None,
    keys: np.ndarray | None = None,
) -> np.ndarray:
    """bool [samples]: the `keep` best samples of every group, and of these only those with reward >= `at_least`.

    Rejection sampling: RAFT, Dong et al. 2023 (arXiv 2304.06767); Llama 2 (arXiv 2307.09288) section 3.2.3. Equal
    rewards are ordered by `keys` (default: the position). A NaN reward is never kept.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    values = np.asarray(rewards, dtype=np.float64)
    ranks = np.arange(len(values)) if keys is None else np.asarray(keys)
    out = np.zeros(len(values), dtype=bool)
    for _, valid in valid_groups(rewards, groups):
        order = np.lexsort((ranks[valid], -values[valid]))
        out[valid[order[:keep]]] = True
    return out if at_least is None else out & (np.nan_to_num(values, nan=-np.inf) >= at_least)
