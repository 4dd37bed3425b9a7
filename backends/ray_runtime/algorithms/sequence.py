"""Policy losses whose ratio is that of the whole response."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rlflow.backends.ray_runtime.algorithms.rows import blank, row_counts, row_ids, row_means, row_sums

_MAX_LOG_RATIO = 20.0


class SequenceSurrogate(NamedTuple):
    """Only `loss` carries a gradient."""

    loss: torch.Tensor
    """[rows], or [tokens] for `gspo_token`"""
    clipped: torch.Tensor
    """[rows]: 1 where the clipped branch was taken"""
    ratio: torch.Tensor
    """[rows]"""


def gspo(
    logp: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    lengths: torch.Tensor,
    clip_low: float,
    clip_high: float,
    *,
    mask: torch.Tensor | None = None,
) -> SequenceSurrogate:
    """-min(s A, clip(s, 1 - low, 1 + high) A) per response, s = exp(mean over tokens of logp - old).

    Zheng et al. 2025 (arXiv 2507.18071) eq. 5 and 7; its loss is the mean over responses. A response without a counted
    token has loss 0 and no gradient.

    Args: `logp`, `old` [tokens]; `advantages` [rows]; `lengths` int64 [rows]; `mask` [tokens], 0 = not counted.
    """
    log_ratio = row_means(logp - blank(old, mask), lengths, mask)
    return _clipped(log_ratio, advantages, row_counts(lengths, mask), clip_low, clip_high)


def gspo_token(
    logp: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    lengths: torch.Tensor,
    clip_low: float,
    clip_high: float,
    *,
    mask: torch.Tensor | None = None,
) -> SequenceSurrogate:
    """The same per token: ratio sg(s) x exp(logp - sg(logp)), loss [tokens], advantages [tokens].

    GSPO-token, arXiv 2507.18071 eq. 13 and 14. Under seq_mean_token_mean its value and gradient are those of `gspo`
    when all tokens of a response have one advantage; a response may be cut by tokens only after this call.
    """
    current = blank(logp, mask)
    log_ratio = row_means((current - blank(old, mask)).detach(), lengths, mask).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()[row_ids(lengths)] * (current - current.detach()).exp()
    free, bounded = -advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    flags = row_means((bounded > free).to(free.dtype).detach(), lengths, mask)
    return SequenceSurrogate(torch.maximum(free, bounded), (flags > 0).to(free.dtype), log_ratio.exp())


def sequence_ppo_clip(
    logp: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    lengths: torch.Tensor,
    clip_low: float,
    clip_high: float,
    *,
    mask: torch.Tensor | None = None,
) -> SequenceSurrogate:
    """-min(R A, clip(R) A) per response, R = exp(sum over tokens of logp - old): the response as one action.

    The form trl's RLOO trainer uses (Ahmadian et al. 2024, arXiv 2402.14740, sequence as a bandit arm). R moves with
    the length, so long responses clip sooner. Arguments as in `gspo`.
    """
    log_ratio = row_sums(logp - blank(old, mask), lengths, mask)
    return _clipped(log_ratio, advantages, row_counts(lengths, mask), clip_low, clip_high)


def _clipped(
    log_ratio: torch.Tensor, advantages: torch.Tensor, counts: torch.Tensor, clip_low: float, clip_high: float
) -> SequenceSurrogate:
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    free, bounded = -advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = blank(torch.maximum(free, bounded), counts)
    return SequenceSurrogate(loss, (bounded > free).to(free.dtype).detach(), ratio.detach())
