"""Advantage estimators. A sample or token whose advantage is NaN is in no loss."""

from __future__ import annotations

import numpy as np
import torch

from rlflow.backends.ray_runtime.algorithms import group as grouped
from rlflow.backends.ray_runtime.algorithms.advantages import group_normalize as plain_group_normalize
from rlflow.backends.ray_runtime.algorithms.gae import discounted_returns
from rlflow.backends.ray_runtime.algorithms.gae import gae as estimate
from rlflow.backends.ray_runtime.algorithms.group import GroupAdvantages
from rlflow.backends.ray_runtime.algorithms.moments import moments, whiten
from rlflow.backends.ray_runtime.algorithms.shaping import score_at_end
from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.stages.call import Call, counted_tokens, rows_with_nan, spread
from rlflow.backends.ray_runtime.stages.groups import Whole, whole_groups
from rlflow.ir.ops import Gae, GroupNormalize, ReinforcePp, Remax, Rloo


def group_normalize(call: Call, op: GroupNormalize) -> np.ndarray:
    whole = _whole(call)
    scores, groups = whole["scores"], whole["group"]
    if np.isfinite(scores).all():  # one pass over the batch instead of one over every group
        return _measured(call, plain_group_normalize(scores, groups, std=op.std, epsilon=op.epsilon)[whole.own])
    found = grouped.valid_group_normalize(scores, groups, std=op.std, epsilon=op.epsilon)
    return _measured(call, _per_row(call, found, whole))


def rloo(call: Call, op: Rloo) -> np.ndarray:
    whole = _whole(call)
    return _measured(call, _per_row(call, grouped.rloo(whole["scores"], whole["group"]), whole))


def remax(call: Call, op: Remax) -> np.ndarray:
    """The baseline's rows are one greedy sample per prompt of the same prompts, joined by `uid`."""
    rows = call.rows_of("baseline")
    others = whole_groups(call, rows, baseline=call.per_row("baseline"), uid=rows.array("uid"))
    baseline, greedy = others["baseline"], others["uid"]
    if len(np.unique(greedy)) != len(greedy):
        raise ValueError("the baseline of remax has several samples of one prompt")
    wanted = call.rows_of("scores").array("uid")
    order = np.argsort(greedy, kind="stable")
    place = np.searchsorted(greedy, wanted, sorter=order)
    found = np.take(greedy[order], place, mode="clip") if len(greedy) else np.full(len(wanted), -1)
    if (found != wanted).any():
        uid = wanted[found != wanted][0]
        raise ValueError(f"the baseline of remax has no sample of the prompt with uid {uid}")
    advantages = grouped.remax(_scores(call), baseline[order[place]])
    return _measured(call, np.where(advantages.counted, advantages.values, np.nan))


def reinforce_pp(call: Call, op: ReinforcePp) -> np.ndarray | Packed:
    """Whitened over all counted tokens of the batch on all ranks, long samples weighing more.

    Scores per sample give a number per sample, as every token of a sample has the same return; scores per token (with a
    KL penalty in them) give returns per token.
    """
    rows = call.rows_of("scores")
    mask = counted_tokens(rows)
    scores = call.column("scores")
    if isinstance(scores, Packed):
        if op.baseline:
            raise ValueError("reinforce_pp with a baseline needs scores per sample")
        rewards, valid = _valid_tokens(scores, mask)
        returns = discounted_returns(rewards, scores.lengths, mask=valid)
        white = whiten(returns, valid, over=call.merged(moments(returns, valid)))
        return _measured_tokens(call, Packed(torch.where(valid > 0, white, _missing(scores, mask)), scores.offsets))
    responses = rows.packed("response_ids")
    tokens = responses.lengths if mask is None else torch.bincount(responses.row_ids()[mask > 0], minlength=rows.rows)
    whole = _whole(call, tokens=tokens.numpy())
    scores = whole["scores"]
    found = GroupAdvantages(np.nan_to_num(scores.astype(np.float64), nan=0.0), ~np.isnan(scores), 0)
    if op.baseline:
        found = grouped.valid_group_normalize(scores, whole["group"], std=False, epsilon=0.0)
    # float32 as the tokens' numbers are, so that a sample's number is its tokens' number
    per_sample, counted = torch.from_numpy(found.values.astype(np.float32)), torch.from_numpy(found.counted)
    own = moments(per_sample.repeat_interleave(torch.from_numpy(np.where(found.counted, whole["tokens"], 0))))
    over = call.merged(own) if rows.share is None else own
    white = whiten(per_sample, counted, over=over).numpy().astype(np.float64)
    return _measured(call, _per_row(call, found._replace(values=white), whole))


def gae(call: Call, op: Gae) -> Packed:
    """float32 per token; 0 at an environment's tokens, NaN at the tokens of a sample without a reward."""
    values = call.per_token("values")
    rows = call.rows_of("values")
    mask = counted_tokens(rows)
    column = call.column("rewards")
    if isinstance(column, np.ndarray):
        if op.output == "advantages":
            call.metrics.rewards(call.stage.id, column)
        column = _at_end(column, rows, mask)
    rewards, valid = _valid_tokens(column, mask)
    found = estimate(rewards, values.values, values.lengths, gamma=op.gamma, lam=op.lam, mask=valid)
    result = found.returns
    if op.output == "advantages":
        result = found.advantages
        if op.whiten:
            result = whiten(result, valid, over=call.merged(moments(result, valid)))
    out = Packed(torch.where(valid > 0, result, _missing(column, mask)), values.offsets)
    name = "critic/returns" if op.output == "returns" else "critic/advantages"
    return _measured_tokens(call, out, name)


def _scores(call: Call) -> np.ndarray:
    scores = call.per_row("scores")
    call.metrics.rewards(call.stage.id, scores)
    return scores


def _whole(call: Call, **more: np.ndarray) -> Whole:
    """The scores and groups, and what else is needed, of whole groups."""
    rows = call.rows_of("scores")
    return whole_groups(call, rows, group=rows.array("group"), scores=_scores(call), **more)


def _per_row(call: Call, found: GroupAdvantages, whole: Whole) -> np.ndarray:
    """The numbers of this rank's samples."""
    if found.skipped_groups and whole.counts:
        call.metrics.sums["critic/skipped_groups"] += float(found.skipped_groups)
    return np.where(found.counted, found.values, np.nan)[whole.own]


def _at_end(scores: np.ndarray, rows: Batch, mask: torch.Tensor | None) -> Packed:
    """Each sample's score at its last counted token; NaN at all tokens of a sample without one."""
    responses = rows.packed("response_ids")
    placed = score_at_end(torch.from_numpy(scores.astype(np.float32)), responses.lengths, mask)
    return Packed(torch.where(torch.isnan(spread(scores, responses)), float("nan"), placed), responses.offsets)


def _valid_tokens(column: Packed, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The column without NaN, and 1 for counted tokens of samples in which no counted token is NaN; both [tokens]."""
    valid = spread(~rows_with_nan(column, mask), column)
    if mask is not None:
        valid = valid * (mask > 0)
    return torch.where(valid > 0, column.values, 0.0), valid


def _missing(column: Packed, mask: torch.Tensor | None) -> torch.Tensor:
    """NaN at the tokens of samples without a number, 0 elsewhere."""
    return torch.where(spread(rows_with_nan(column, mask), column) > 0, float("nan"), 0.0)


def _measured(call: Call, advantages: np.ndarray) -> np.ndarray:
    call.metrics.advantages(advantages)
    return advantages


def _measured_tokens(call: Call, column: Packed, name: str = "critic/advantages") -> Packed:
    mask = counted_tokens(call.rows_of("values" if call.has("values") else "scores"))
    call.metrics.spread(name, (column.values if mask is None else column.values[mask > 0]).numpy())
    return column
