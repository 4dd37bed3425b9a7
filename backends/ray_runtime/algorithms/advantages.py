"""Advantage estimators: one number per sample out of the rewards of its group."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def group_normalize(rewards: np.ndarray, groups: np.ndarray, *, std: bool, epsilon: float) -> np.ndarray:
    """Reward minus the group's mean, over the group's standard deviation plus `epsilon`.

    Shao et al. 2024 (arXiv 2402.03300) section 4.1; with `std=False` the mean only, Liu et al. 2025 (arXiv 2503.20783,
    Dr. GRPO). The deviation is the sample deviation (divided by size - 1), as in trl and verl. A group whose rewards
    are all equal, and so a group of one, gets exactly 0.

    Args: `rewards` float [samples], `groups` int [samples]: any labels, groups may be of any size and interleaved.
    Returns float64 [samples]. Sums are exact (`math.fsum`), so the order of samples and of groups changes no bit.
    """
    values = np.asarray(rewards, dtype=np.float64)
    labels = np.asarray(groups)
    if values.ndim != 1 or labels.shape != values.shape:
        raise ValueError(f"rewards have shape {values.shape} and groups {labels.shape}; both must be [samples]")
    out = np.zeros_like(values)
    if not values.size:
        return out
    _, inverse, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    for members in np.split(order, np.cumsum(sizes)[:-1]):
        group = values[members]
        if group.min() == group.max():
            continue
        centred = group - math.fsum(group) / len(group)
        if std:
            centred /= math.sqrt(math.fsum(centred * centred) / (len(group) - 1)) + epsilon
        out[members] = centred
    return out


def groups_from_sizes(sizes: Sequence[int], samples: int) -> np.ndarray:
    """Group labels int64 [samples] of groups that lie one after another; ValueError when sizes do not fit."""
    if any(size < 1 for size in sizes):
        raise ValueError(f"group sizes {list(sizes)} contain a group without samples")
    if sum(sizes) != samples:
        raise ValueError(f"group sizes {list(sizes)} sum to {sum(sizes)}, the batch has {samples} samples")
    return np.repeat(np.arange(len(sizes), dtype=np.int64), np.asarray(sizes, dtype=np.int64))
