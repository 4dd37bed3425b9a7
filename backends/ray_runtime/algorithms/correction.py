"""Importance weights between the policy that sampled and the one that learning starts from.

behaviour = log-probs the rollout engine gave when it sampled; old (or proximal) = the trainer's log-probs of the same
tokens before the update. The weight is old / behaviour, never current / behaviour, and carries no gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from rlflow.backends.ray_runtime.algorithms.rows import blank, check_rows, row_counts, row_ids, row_means, row_sums

Level = Literal["token", "sequence", "sequence_mean"]
"""What one weight belongs to: a token; a response, by the product of its tokens' ratios (unbiased, grows with the
length); a response, by their geometric mean."""
_MAX_LOG_RATIO = 20.0


class Correction(NamedTuple):
    """No gradient. `raw` and `outside` are [tokens] at token level, [rows] at both sequence levels."""

    weights: torch.Tensor
    """[tokens]: what the loss of a token is multiplied with; 0 where not counted"""
    raw: torch.Tensor
    """the ratio before bounding"""
    outside: torch.Tensor
    """bool: beyond a bound, and so truncated or masked"""


def importance_weights(
    old: torch.Tensor,
    behaviour: torch.Tensor,
    lengths: torch.Tensor,
    *,
    level: Level = "token",
    cap: float | None = 2.0,
    floor: float | None = None,
    outside: Literal["truncate", "mask"] = "truncate",
    mask: torch.Tensor | None = None,
) -> Correction:
    """old / behaviour per token or per response, bounded by [floor, cap].

    truncate: min(w, cap), raised to `floor` if one is given: truncated importance sampling (Ionides 2008; IMPALA,
    arXiv 1802.01561, eq. 1; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
    mask: weight 0 outside the bounds: IcePop at token level, sequence masking at sequence level.

    Args: `old`, `behaviour` [tokens]; `lengths` int64 [rows]; `mask` [tokens], 0 = not counted: such tokens may hold
    anything, NaN too. None for a bound = no bound.
    """
    check_rows(lengths, old, behaviour, mask)
    log_ratio = blank(old, mask).detach() - blank(behaviour, mask).detach()
    if level == "sequence":
        log_ratio = row_sums(log_ratio, lengths, mask)
    elif level == "sequence_mean":
        log_ratio = row_means(log_ratio, lengths, mask)
    raw = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    beyond = torch.zeros_like(raw, dtype=torch.bool)
    if cap is not None:
        beyond |= raw > cap
    if floor is not None:
        beyond |= raw < floor
    bounded = raw.clamp(min=floor, max=cap) if (floor, cap) != (None, None) else raw
    weights = bounded if outside == "truncate" else torch.where(beyond, torch.zeros_like(raw), raw)
    per_token = weights if level == "token" else weights[row_ids(lengths)]
    return Correction(blank(per_token, mask), raw, beyond)


def correction_metrics(
    found: Correction,
    lengths: torch.Tensor,
    *,
    level: Level,
    total_tokens: float,
    total_rows: float,
    mask: torch.Tensor | None = None,
) -> dict[str, float]:
    """Sums over these rows divided by totals of the whole batch, so that parts add up. Names say token or sequence.

    `weight_mean` is that of the raw ratio (1 in expectation when both policies agree), `outside_share` the share that
    was truncated or masked. Totals count unmasked tokens, and rows that have one.
    """
    if level == "token":
        unit, total, counted = "token", total_tokens, torch.ones_like(found.raw) if mask is None else mask > 0
    else:
        unit, total, counted = level, total_rows, row_counts(lengths, mask) > 0
    scale = 1.0 / total if total else 0.0
    raw, beyond = blank(found.raw, counted), blank(found.outside.to(found.raw.dtype), counted)
    return {
        f"correction/{unit}_weight_mean": float(raw.double().sum()) * scale,
        f"correction/{unit}_outside_share": float(beyond.double().sum()) * scale,
    }
