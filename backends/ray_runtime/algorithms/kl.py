"""Estimators of KL(policy || reference) from samples of the policy."""

from __future__ import annotations

from typing import Literal

import torch

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logp: torch.Tensor, reference: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """KL per token; J. Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).

    With r = p_reference / p_policy: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r. As a loss, k1 does not depend
    on the reference in expectation (its gradient is the score function), k2's gradient is that of the KL, and k3 is
    the one GRPO uses (arXiv 2402.03300 eq. 4).

    Args and result: float32 [tokens]; the gradient flows through `logp`.
    """
    log_ratio = reference - logp
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio
