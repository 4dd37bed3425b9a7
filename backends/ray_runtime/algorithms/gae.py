"""Advantages and returns per token, by recursion from each row's end."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from rlflow.backends.ray_runtime.algorithms.rows import check_rows, padded, repacked

Clock = Literal["all", "counted"]
"""What a step of time is when discounting over tokens that are not counted: "all" = every token, "counted" = only
those that the policy chose. No difference for gamma = 1 or when only a row's end is masked."""


class Estimate(NamedTuple):
    """Both [tokens], of the dtype of `values`; 0 where not counted."""

    advantages: torch.Tensor
    returns: torch.Tensor
    """advantage + value: what the value function is trained towards"""


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    mask: torch.Tensor | None = None,
    bootstrap: torch.Tensor | None = None,
    clock: Clock = "all",
) -> Estimate:
    """Generalised advantage estimation, Schulman et al. 2015 (arXiv 1506.02438) eq. 16, over the counted tokens.

    The successor of a counted token is the next counted token; after the last one the value is 0, or `bootstrap`.
    Rewards and values of tokens that are not counted are never read. lambda is applied once per counted token, gamma
    as `clock` says.

    Args:
        rewards, values: float [tokens]. lengths: int64 [rows]. mask: [tokens], 0 = not counted.
        bootstrap: float [rows], value of the state behind the row, for rows that were cut off.
    """
    check_rows(lengths, rewards, values, mask)
    reward, value = padded(rewards.double(), lengths), padded(values.double(), lengths)
    counted = _counted(lengths, mask)
    exists = padded(torch.ones_like(rewards, dtype=torch.float64), lengths) > 0
    following = reward.new_zeros(len(lengths)) if bootstrap is None else bootstrap.double().clone()
    carried = torch.zeros_like(following)
    discount = torch.full_like(following, gamma)
    advantages = torch.zeros_like(reward)
    for step in reversed(range(reward.shape[1])):
        here = counted[:, step]
        delta = reward[:, step] + discount * following - value[:, step]
        advantage = delta + discount * lam * carried
        advantages[:, step] = torch.where(here, advantage, torch.zeros_like(advantage))
        carried = torch.where(here, advantage, carried)
        following = torch.where(here, value[:, step], following)
        passed = discount * gamma if clock == "all" else discount
        discount = torch.where(here, torch.full_like(discount, gamma), torch.where(exists[:, step], passed, discount))
    returns = torch.where(counted, advantages + value, torch.zeros_like(value))
    return Estimate(repacked(advantages, lengths).to(values.dtype), repacked(returns, lengths).to(values.dtype))


def discounted_returns(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    *,
    gamma: float = 1.0,
    mask: torch.Tensor | None = None,
    clock: Clock = "all",
) -> torch.Tensor:
    """Sum of gamma^(distance) x reward over the counted tokens from each token on: [tokens], 0 where not counted.

    Sutton & Barto 2018 eq. 3.8. It is `gae` with values 0 and lambda 1.
    """
    return gae(rewards, torch.zeros_like(rewards), lengths, gamma=gamma, lam=1.0, mask=mask, clock=clock).returns


def _counted(lengths: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """bool [rows, longest]"""
    ones = torch.ones(int(lengths.sum()), device=lengths.device)
    return padded(ones if mask is None else (mask > 0).to(torch.float32), lengths) > 0
