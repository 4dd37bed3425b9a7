"""Advantages per sample out of the rewards of its group.

A reward of NaN means "not applicable" (a reward function answered None; a NaN that it computed is refused before it
gets here): the sample enters no mean, gets advantage 0 and is not counted. An infinite reward is an error.
Sums are exact (`math.fsum`), so the order of samples and of groups changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rlflow.backends.ray_runtime.algorithms.advantages import group_normalize


class GroupAdvantages(NamedTuple):
    values: np.ndarray
    """float64 [samples]; 0 where not counted"""
    counted: np.ndarray
    """bool [samples]; False = no loss term may use the sample, KL and entropy included"""
    skipped_groups: int
    """groups of which no sample is counted"""


def valid_groups(rewards: np.ndarray, groups: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(all members, members with a reward) of every group, as int64 indices.

    `rewards` float [samples], NaN = not applicable; `groups` int [samples]: any labels, interleaved or not.
    """
    values, labels = np.asarray(rewards, dtype=np.float64), np.asarray(groups)
    if values.ndim != 1 or labels.shape != values.shape:
        raise ValueError(f"rewards have shape {values.shape} and groups {labels.shape}; both must be [samples]")
    if np.isinf(values).any():
        raise ValueError(f"the reward of sample {int(np.flatnonzero(np.isinf(values))[0])} is infinite")
    if not values.size:
        return
    _, inverse, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    for members in np.split(order, np.cumsum(sizes)[:-1]):
        yield members, members[~np.isnan(values[members])]


def valid_group_normalize(
    rewards: np.ndarray, groups: np.ndarray, *, std: bool, epsilon: float, drop_equal: bool = False
) -> GroupAdvantages:
    """`group_normalize` over the samples that have a reward: GRPO (arXiv 2402.03300), Dr. GRPO with `std=False`.

    `drop_equal`: a group whose rewards are all equal is not counted either, so that it gets no KL gradient (trl#7068).
    """
    out = _empty(rewards)
    skipped = 0
    for _, valid in valid_groups(rewards, groups):
        chosen = np.asarray(rewards, dtype=np.float64)[valid]
        if not valid.size or (drop_equal and chosen.min() == chosen.max()):
            skipped += 1
            continue
        out.counted[valid] = True
        out.values[valid] = group_normalize(chosen, np.zeros(valid.size, np.int64), std=std, epsilon=epsilon)
    return out._replace(skipped_groups=skipped)


def rloo(rewards: np.ndarray, groups: np.ndarray) -> GroupAdvantages:
    """REINFORCE leave-one-out: reward minus the mean reward of the group's other samples.

    Ahmadian et al. 2024 (arXiv 2402.14740), the RLOO estimator. ValueError for a group of one sample: it has no
    others. A group in which only one sample has a reward is skipped.
    """
    out = _empty(rewards)
    values = np.asarray(rewards, dtype=np.float64)
    skipped = 0
    for members, valid in valid_groups(rewards, groups):
        if members.size == 1:
            raise ValueError("leave-one-out needs at least 2 samples per prompt; a group has 1")
        if valid.size < 2:
            skipped += 1
            continue
        chosen = values[valid]
        out.counted[valid] = True
        if chosen.min() < chosen.max():
            # r - (S - r) / (n - 1) = (r - S / n) n / (n - 1)
            out.values[valid] = (chosen - math.fsum(chosen) / valid.size) * (valid.size / (valid.size - 1))
    return out._replace(skipped_groups=skipped)


def opo(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray) -> GroupAdvantages:
    """On-policy RL with the optimal baseline: reward minus the group's mean weighted by response length.

    Hao et al. 2025 (arXiv 2505.23585): the variance-optimal baseline when a gradient's squared norm grows with the
    length. `lengths` [samples]: counted tokens. A group without a token is skipped.
    """
    out = _empty(rewards)
    values, tokens = np.asarray(rewards, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
    skipped = 0
    for _, valid in valid_groups(rewards, groups):
        chosen, weights = values[valid], tokens[valid]
        total = math.fsum(weights)
        if not total:
            skipped += 1
            continue
        out.counted[valid] = True
        if chosen.min() < chosen.max():
            out.values[valid] = chosen - math.fsum(chosen * weights) / total
    return out._replace(skipped_groups=skipped)


def remax(rewards: np.ndarray, baselines: np.ndarray) -> GroupAdvantages:
    """Reward minus the reward of the greedy response to the same prompt; Li et al. 2023 (arXiv 2310.10505).

    Both float [samples]; `baselines` holds the prompt's greedy reward at each of its samples. A sample whose reward or
    baseline is NaN is not counted; `skipped_groups` is 0, since there are no groups.
    """
    difference = np.asarray(rewards, dtype=np.float64) - np.asarray(baselines, dtype=np.float64)
    if np.isinf(difference).any():
        raise ValueError(f"sample {int(np.flatnonzero(np.isinf(difference))[0])} has an infinite reward or baseline")
    counted = ~np.isnan(difference)
    return GroupAdvantages(np.where(counted, difference, 0.0), counted, 0)


def _empty(rewards: np.ndarray) -> GroupAdvantages:
    samples = len(rewards)
    return GroupAdvantages(np.zeros(samples), np.zeros(samples, dtype=bool), 0)
