"""Training a value function, and how good it is."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rlflow.backends.ray_runtime.algorithms.moments import moments


class ValueLoss(NamedTuple):
    """Both [tokens]; only `loss` carries a gradient."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """1 where the clipped branch was taken: its mean is verl's vf_clipfrac"""


def value_clip(values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None) -> ValueLoss:
    """max((v - R)^2, (old + clip(v - old, -c, c) - R)^2) / 2 per token.

    As in OpenAI Baselines' PPO2, verl and trl; the PPO paper itself (arXiv 1707.06347 eq. 9) has the plain square,
    which `clip` = None gives. `clip` is in units of the return. `values`, `old`, `returns` float [tokens].
    """
    free = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * free, torch.zeros_like(free).detach())
    bounded = (values.clamp(old - clip, old + clip) - returns).square()
    return ValueLoss(0.5 * torch.maximum(free, bounded), (bounded > free).to(free.dtype).detach())


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor | None = None) -> float:
    """1 - Var(R - v) / Var(R) over counted tokens: 1 perfect, 0 no better than a constant, negative worse.

    NaN when the returns do not vary. For parts on several ranks, merge `moments` of both and divide.
    """
    spread = moments(returns, mask).variance
    return 1.0 - moments(returns - values, mask).variance / spread if spread > 0 else float("nan")
