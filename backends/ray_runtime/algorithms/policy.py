"""Policy-gradient losses per token beside `losses.ppo_clip`. All to be minimised, all [tokens], aggregated elsewhere.

`logp` carries the gradient; `old` (log-probs of the policy the ratio is taken against), `advantages` and weights do
not. Values of tokens that are not counted must be finite: `rows.blank(old, mask)` makes them so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rlflow.backends.ray_runtime.algorithms.losses import Surrogate, ppo_clip

_MAX_LOG_RATIO = 20.0


class DualSurrogate(NamedTuple):
    """All float [tokens]; only `loss` carries a gradient."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """1 where the PPO clip was taken: its mean is verl's pg_clipfrac."""
    floored: torch.Tensor
    """1 where the bound for negative advantages was taken: verl's pg_clipfrac_lower."""
    kl: torch.Tensor
    """old - new: its mean estimates KL(old || new)."""


def reinforce(logp: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """-A log pi: the score-function estimator, Williams 1992. No ratio, so right for fresh samples only."""
    return -advantages.detach() * logp


def ppo_dual_clip(
    logp: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float, dual: float
) -> DualSurrogate:
    """`ppo_clip`, with the loss of a token with negative advantage bounded by -dual x A.

    Ye et al. 2019 (arXiv 1912.09729): max(min(r A, clip(r) A), c A) for A < 0. `dual` is c, verl's clip_ratio_c (3 by
    default there) and trl's delta; it must be above 1 + clip_high, or it would also cut where clipping does not.
    """
    if dual <= 1.0 + clip_high:
        raise ValueError(f"the dual bound {dual} must be above 1 + clip_high = {1.0 + clip_high}")
    base = ppo_clip(logp, old, advantages, clip_low, clip_high)
    bound = -advantages * dual
    floored = (advantages < 0) & (base.loss > bound)
    loss = torch.where(floored, bound, base.loss)
    return DualSurrogate(loss, base.clipped, floored.to(loss.dtype).detach(), base.kl)


def cispo(
    logp: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_low: float | None, clip_high: float
) -> Surrogate:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: every token keeps its gradient, only its weight is bounded.

    MiniMax-M1, Chen et al. 2025 (arXiv 2506.13585) eq. 4 and 5. `clip_low` = None puts no lower bound, as in the
    paper's runs; trl's epsilon_high is 1 + our clip_high. `clipped` is 1 wherever the weight was bounded.
    """
    ratio = (logp - old).detach().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    weight = ratio.clamp(min=None if clip_low is None else 1.0 - clip_low, max=1.0 + clip_high)
    return Surrogate(-weight * advantages * logp, (weight != ratio).to(ratio.dtype), -(logp - old).detach())


def decoupled_ppo(
    logp: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    weights: torch.Tensor,
) -> Surrogate:
    """`ppo_clip` against the proximal policy, times the weight proximal / behaviour.

    Hilton et al. 2021 (arXiv 2110.00641), decoupled objective; AReaL, Fu et al. 2025 (arXiv 2505.24298). Three
    policies: the one that sampled (behaviour), a recent one that clipping keeps close to (proximal), the current one.
    With a bounded weight this is also truncated importance sampling between engine and trainer.

    Args: `weights` [tokens]: `correction.importance_weights(proximal, behaviour, ...).weights`.
    """
    base = ppo_clip(logp, proximal, advantages, clip_low, clip_high)
    return base._replace(loss=base.loss * weights.detach())
