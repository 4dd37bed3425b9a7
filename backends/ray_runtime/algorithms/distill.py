"""Learning from teachers' distributions on the student's own samples (or on a data set's).

Forward KL = KL(teacher || student), covers all the teacher does; reverse KL = KL(student || teacher), keeps to what
the teacher finds likely. Teachers' tensors carry no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

Kind = Literal["forward", "reverse", "jsd"]


def reverse_kl_advantages(
    logp: torch.Tensor, teachers: Sequence[torch.Tensor], weights: Sequence[float | torch.Tensor]
) -> torch.Tensor:
    """Advantage of each sampled token: sum over teachers of weight x (log teacher - log student), no gradient.

    On-policy distillation as a policy gradient: with `reinforce` (or a clipped ratio) its expected gradient is that of
    the sum of weight x KL(student || teacher), with each token judged by itself. MiniLLM, Gu et al. 2023 (arXiv
    2306.08543), its single-step part; Lu & Thinking Machines Lab 2025, "On-policy distillation".

    Args: `logp` and every teacher's log-prob of the sampled token [tokens]; a weight is a number, or [tokens] where
    teachers differ by row (0 = this teacher says nothing here, its value may then be NaN).
    """
    _check(teachers, weights)
    student, out = logp.detach(), torch.zeros_like(logp)
    for teacher, weight in zip(teachers, weights, strict=True):
        scale = torch.as_tensor(weight, dtype=out.dtype, device=out.device).expand_as(out)
        gap = torch.where(scale != 0, teacher.detach() - student, torch.zeros_like(out))
        out = out + scale * gap
    return out


def divergence(student: torch.Tensor, teacher: torch.Tensor, kind: Kind, *, mix: float = 0.5) -> torch.Tensor:
    """Exact divergence per token over the whole vocabulary: log-probs [tokens, vocabulary] -> [tokens].

    jsd: mix x KL(teacher || m) + (1 - mix) x KL(student || m), m = mix x teacher + (1 - mix) x student; generalised
    Jensen-Shannon divergence of GKD, Agarwal et al. 2023 (arXiv 2306.13649) eq. 1, 0 < mix < 1. It tends to 0 at both
    ends; divided by mix (by 1 - mix) it tends to forward KL at 0 (to reverse KL at 1).
    """
    teacher = teacher.detach()
    if kind == "forward":
        return _kl(teacher, student)
    if kind == "reverse":
        return _kl(student, teacher)
    if not 0.0 < mix < 1.0:
        raise ValueError(f"mix must lie between 0 and 1, not {mix}")
    shares = torch.tensor([mix, 1.0 - mix], dtype=student.dtype, device=student.device).log()
    middle = torch.logsumexp(torch.stack([teacher + shares[0], student + shares[1]]), 0)
    return mix * _kl(teacher, middle) + (1.0 - mix) * _kl(student, middle)


def topk_divergence(
    student: torch.Tensor,
    teacher_top: torch.Tensor,
    teacher_ids: torch.Tensor,
    kind: Kind,
    *,
    mix: float = 0.5,
    tail: bool = True,
) -> torch.Tensor:
    """`divergence` from the teacher's k likeliest tokens only: [tokens].

    `tail` puts all other tokens into one bin, so both sides stay distributions: the result is >= 0, at most the exact
    divergence, equal to it at k = vocabulary. Without it the sum runs over the k tokens only and may be negative
    (verl sets it to 0 then, and with it the gradient).

    Args: `student` log-probs [tokens, vocabulary]; `teacher_top` log-probs [tokens, k] of the tokens `teacher_ids`
    int64 [tokens, k], under the teacher's full softmax.
    """
    ours, theirs = student.gather(-1, teacher_ids), teacher_top.detach()
    if tail:
        ours, theirs = _with_rest(ours), _with_rest(theirs)
    return divergence(ours, theirs, kind, mix=mix)


def mixed_divergence(
    student: torch.Tensor,
    teachers: Sequence[torch.Tensor],
    weights: Sequence[float | torch.Tensor],
    kind: Kind,
    *,
    mix: float = 0.5,
) -> torch.Tensor:
    """Weighted sum of `divergence` to several teachers; weights as in `reverse_kl_advantages`. [tokens]"""
    _check(teachers, weights)
    out = student.new_zeros(student.shape[:-1])
    for teacher, weight in zip(teachers, weights, strict=True):
        scale = torch.as_tensor(weight, dtype=student.dtype, device=student.device).expand_as(out)
        silent = (scale == 0).unsqueeze(-1)
        # A silent teacher is replaced by the student itself: divergence 0, and no gradient that is not finite.
        out = out + scale * divergence(student, torch.where(silent, student, teacher), kind, mix=mix)
    return out


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """KL(first || second) over the last axis; a token that `first` excludes (log-prob -inf) counts 0."""
    possible = first > float("-inf")
    one, two = first.masked_fill(~possible, 0.0), second.masked_fill(~possible, 0.0)
    return torch.where(possible, one.exp() * (one - two), torch.zeros_like(one)).sum(-1)


def _with_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """One more entry: the log of the probability that the given ones leave, at least the dtype's smallest step."""
    smallest = torch.finfo(log_probs.dtype).eps
    rest = (1.0 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=smallest)
    return torch.cat([log_probs, rest.log()], -1)


def _check(teachers: Sequence[torch.Tensor], weights: Sequence[float | torch.Tensor]) -> None:
    if not teachers or len(teachers) != len(weights):
        raise ValueError(f"{len(teachers)} teachers and {len(weights)} weights; one weight per teacher, at least one")
