"""Metrics. Shares are sums over the rows at hand divided by totals of the whole batch, so that parts add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from rlflow.backends.ray_runtime.algorithms.kl import kl_estimate
from rlflow.backends.ray_runtime.algorithms.rows import blank, row_sums


def token_share(flags: torch.Tensor, *, total_tokens: float, mask: torch.Tensor | None = None) -> float:
    """Share of counted tokens whose flag is 1, e.g. of clipped tokens; `flags` [tokens]."""
    return float(blank(flags, mask).double().sum()) / total_tokens if total_tokens else 0.0


def sequence_share(
    flags: torch.Tensor, lengths: torch.Tensor, *, total_rows: float, mask: torch.Tensor | None = None
) -> float:
    """Share of responses with at least one counted token whose flag is 1; `flags` [tokens]."""
    return float((row_sums(flags, lengths, mask) > 0).double().sum()) / total_rows if total_rows else 0.0


def approx_kl(logp: torch.Tensor, old: torch.Tensor, estimator: Literal["k1", "k2", "k3"] = "k3") -> torch.Tensor:
    """Estimate per token of KL(old || new) on samples of `old`, no gradient: how far an update went. [tokens]

    Schulman 2020: with r = new / old, k1 = -log r (verl's ppo_kl), k3 = r - 1 - log r, which is never negative.
    """
    return kl_estimate(old.detach(), logp.detach(), estimator)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of `k` samples, drawn without replacement from `samples`, is correct.

    Unbiased: 1 - C(n - c, k) / C(n, k); Chen et al. 2021 (arXiv 2107.03374) eq. 1.
    """
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(f"pass@{k} needs 1 <= k <= samples and 0 <= correct <= samples, not {correct} of {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_pass_at_k(groups: Sequence[tuple[int, int]], k: int) -> float:
    """Mean of `pass_at_k` over prompts given as (samples, correct); NaN without prompts."""
    return math.fsum(pass_at_k(n, c, k) for n, c in groups) / len(groups) if groups else float("nan")
