"""Per-token losses on packed response tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

_MAX_LOG_RATIO = 20.0


class Surrogate(NamedTuple):
    """All float32 [tokens]; only `loss` carries a gradient."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """1 where the clipped branch was taken: its mean is verl's pg_clipfrac."""
    kl: torch.Tensor
    """old log-prob minus new: its mean estimates KL(old || new), verl's ppo_kl."""


def ppo_clip(
    logp: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> Surrogate:
    """The clipped surrogate, to be minimised: -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logp - old).

    Schulman et al. 2017 (arXiv 1707.06347) eq. 7; two bounds as in DAPO (arXiv 2503.14476) eq. 10. The log-ratio is
    bounded to +-20, as verl does, so that one far-off token is clipped away instead of making the loss infinite.

    Args: `logp`, `old`, `advantages` float32 [tokens]; `old` without gradient.
    """
    log_ratio = (logp - old).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return Surrogate(torch.maximum(free, bounded), (bounded > free).to(free.dtype).detach(), -(logp - old).detach())


def entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """Shannon entropy in nats of each distribution: log-probabilities [tokens, vocabulary] -> [tokens]."""
    return -(log_probs.exp() * log_probs).sum(-1)
