"""Rewards: started beside other stages, collected late.

Where ranks share groups and the reward's function takes lists, every group is scored as a whole on the rank that has
its first sample, and the scores go back to the ranks whose samples they are.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch.distributed as dist

from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.reward_worker import Handle
from rlflow.backends.ray_runtime.rewards import DROPPED, NOT_APPLICABLE, NothingScored, Scores
from rlflow.backends.ray_runtime.stages.call import Call
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Score

_READ = ("uid", "group", "sample", "record", "text", "prompt_ids", "response_ids")
"""Columns that scoring a sample needs."""


def start_score(call: Call, op: Score) -> Handle:
    call.started()
    samples, pool = call.batch("samples"), call.state.rewards[op.reward]
    if samples.share is not None and pool.batched:
        sent = Batch(samples.rows, {name: samples.columns[name] for name in _READ})
        whole = Batch.concat(_from_all_ranks(call, sent))
        begun = samples.share.begun
        groups = whole.array("group")
        samples = whole.select(np.flatnonzero((groups >= begun.start) & (groups < begun.stop)))
    return pool.start(samples)


def collect_score(call: Call, op: Score) -> np.ndarray:
    """float32 [samples], of the call that `start_score` began."""
    handle = call.frame.values[call.stage.id]
    assert isinstance(handle, Handle)
    # The value `samples` may be gone by now: the start was its last reader.
    samples, pool = call.frame.rows[call.stage.id], call.state.rewards[op.reward]
    nothing: NothingScored | None = None
    try:
        scores, extras = pool.collect(handle)
    except NothingScored as failure:
        nothing, (scores, extras) = failure, failure.scores
    if samples.share is not None and pool.batched:
        scores, extras = _own(samples, _from_all_ranks(call, (scores, extras)))
    if samples.share is not None:
        extras = _with_flags(call, extras, samples.rows)
    _check_some(call, op, nothing, len(scores))
    call.metrics.scores(call.stage.id, scores, extras)
    call.metrics.call(call.stage, call.step, call.frame.started.pop(call.stage.id), time.time(), pool.ended)
    return scores


def _own(samples: Batch, parts: list[Scores]) -> Scores:
    """This rank's samples out of what every rank scored, which together is the whole step in order."""
    assert samples.share is not None
    scores = np.concatenate([part for part, _ in parts])
    mine = samples.share.samples(len(scores) // samples.share.prompts)
    chosen = slice(mine.start, mine.stop)
    names = dict.fromkeys(name for _, extras in parts for name in extras)
    extras = {name: [e for part, own in parts for e in own.get(name, [None] * len(part))][chosen] for name in names}
    return scores[chosen], extras


def _with_flags(call: Call, extras: dict[str, list[Any]], rows: int) -> dict[str, list[Any]]:
    """`extras` with the flags that another rank sets: a mean over all samples counts those without it too."""
    flags = (NOT_APPLICABLE, DROPPED)
    ranks = call.over_ranks([float(flag in extras) for flag in flags]).sum(axis=0).tolist()
    said = {flag: extras.get(flag, [False] * rows) for flag, there in zip(flags, ranks, strict=True) if there}
    return extras | {flag: [bool(value) for value in values] for flag, values in said.items()}


def _check_some(call: Call, op: Score, nothing: NothingScored | None, rows: int) -> None:
    """Raise `nothing` unless another rank scored a sample of this step."""
    drops = any(r.name == op.reward and r.source.on_error == "drop" for r in call.state.plan.rewards)
    if not drops or call.state.group is None:
        if nothing is not None:
            raise nothing
        return
    found = call.over_ranks([float(rows > 0 and nothing is None), float(rows)])
    if nothing is not None and not found[:, 0].any():
        notes = (*nothing.notes[:-1], f"none of the {int(found[:, 1].sum())} samples of this step could be scored")
        raise RunFailure(nothing.code, nothing.message, notes=notes, help=nothing.help, trace=nothing.trace)


def _from_all_ranks(call: Call, mine: Any) -> list[Any]:
    """What every rank gives, in rank order. All ranks must call."""
    group = call.state.group
    if group is None:
        raise ValueError("ranks share groups, and none is connected")
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, mine, group=group)
    return parts
