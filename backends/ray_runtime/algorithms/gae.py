"""Advantages and returns per token, by recursion from each row's end. In float64, so for tensors in host memory."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from rlflow.backends.ray_runtime.algorithms.rows import check_rows, padded, positions, repacked, row_ids

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
    tokens = int(lengths.sum())
    where = torch.arange(tokens, device=lengths.device) if mask is None else torch.nonzero(mask > 0)[:, 0]
    rows = row_ids(lengths)[where]
    own = torch.bincount(rows, minlength=len(lengths))
    times, ends = (positions(lengths)[where], lengths) if clock == "all" else (positions(own), own)
    value = values.detach().double()[where]
    # What follows each counted token: the row's next one, or its end.
    last = positions(own) + 1 == own[rows]
    after = value.new_zeros(len(lengths)) if bootstrap is None else bootstrap.detach().double()
    following = torch.where(last, after[rows], value.roll(-1))
    gap = torch.where(last, ends[rows], times.roll(-1)) - times
    discount = gamma ** gap.double()
    delta = padded(rewards.detach().double()[where] + discount * following - value, own).T.contiguous()
    decay = padded(discount * lam, own).T.contiguous()
    for step in range(len(delta) - 2, -1, -1):
        delta[step].addcmul_(decay[step], delta[step + 1])
    advantages = repacked(delta.T, own)
    spread = value.new_zeros((2, tokens))
    spread[:, where] = torch.stack([advantages, advantages + value])
    return Estimate(spread[0].to(values.dtype), spread[1].to(values.dtype))


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
