"""Stages that keep some of the samples. What they keep carries `score`, and its groups are numbered anew.

A refill takes further prompts and puts what is kept of them behind what was kept before. On several ranks the rows of
one batch are then no longer consecutive over the ranks; the column `round` (which taking of prompts a row is from)
gives every row its place, the one it has on a single rank: by round, then rank, then position.
"""

from __future__ import annotations

import numpy as np

from rlflow.backends.ray_runtime.algorithms.group import valid_groups
from rlflow.backends.ray_runtime.algorithms.imitation import best_of_n
from rlflow.backends.ray_runtime.algorithms.preference import best_worst_pairs
from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.stages.call import Call, Frame
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import BestOf, BestWorst, MixedGroups, Take


def best_of(call: Call, op: BestOf) -> Batch:
    samples, scores = _inputs(call)
    kept = best_of_n(scores, samples.array("group"), keep=op.keep, at_least=op.at_least, keys=samples.array("sample"))
    call.metrics.sums["filter/kept"] += float(kept.sum())
    call.metrics.sums["filter/dropped"] += float(len(kept) - kept.sum())
    return _chosen(samples, scores, np.flatnonzero(kept))


def best_worst(call: Call, op: BestWorst) -> Batch:
    samples, scores = _inputs(call)
    pairs = best_worst_pairs(scores, samples.array("group"), samples.array("sample"))
    call.metrics.sums["filter/kept"] += float(len(pairs.chosen))
    call.metrics.sums["filter/dropped"] += float(pairs.skipped_groups)
    return _chosen(samples, scores, np.stack([pairs.chosen, pairs.rejected], 1).reshape(-1))


def mixed_groups(call: Call, op: MixedGroups) -> Batch:
    """Exactly as many groups as the step takes prompts, over all ranks, unless `on_short` lets fewer through.

    RunFailure: RLF5016 too few groups.
    """
    target = _prompts(call)
    rounds: list[Batch] = []
    seen = kept = 0
    frame = call.frame
    while True:
        samples, scores = _inputs(call, frame)
        labels, groups = _mixed(samples, scores)
        found = call.over_ranks([float(len(labels)), float(groups)])
        if rounds and not found[:, 1].sum():
            break  # the re-run gave nothing at all, so another would not either
        seen += int(found[:, 1].sum())
        # Surplus can only come in the last round. It is cut off the end, in the order of ranks.
        room = len(labels)
        if target is not None:
            room = int(np.clip(target - kept - found[: call.state.rank, 0].sum(), 0, len(labels)))
        kept += int(found[:, 0].sum())
        batch = _chosen(samples, scores, np.flatnonzero(np.isin(samples.array("group"), labels[:room])))
        call.metrics.sums["filter/kept"] += float(room)
        call.metrics.sums["filter/dropped"] += float(groups - len(labels))
        call.metrics.sums["filter/surplus"] += float(len(labels) - room)
        rounds.append(batch)
        if target is None or kept >= target or len(rounds) > op.refill:
            break
        frame = call.rerun(call.stage)
    call.metrics.sums["filter/refills"] += float(len(rounds) - 1) if call.state.rank == 0 else 0.0
    if target is not None and kept < target and op.on_short == "error":
        raise _too_few(op, kept, target, seen)
    return _joined(rounds)


def numbers_in_batch(call: Call, samples: Batch) -> np.ndarray | None:
    """int64 [samples]: the rows' numbers in the whole batch after a refill; None when ranks hold consecutive parts.

    All ranks must call: whether there was a refill is the same on each.
    """
    if "round" not in samples.columns or call.state.group is None:
        return None
    rounds = samples.array("round")
    longest = int(call.over_ranks([float(rounds.max(initial=0))]).max()) + 1
    counts = call.over_ranks(np.bincount(rounds, minlength=longest).astype(float).tolist()).astype(np.int64)
    before = np.cumsum(counts.sum(0)) - counts.sum(0)  # rows of earlier rounds
    first = before + counts[: call.state.rank].sum(0)
    own = np.arange(len(rounds)) - (np.cumsum(counts[call.state.rank]) - counts[call.state.rank])[rounds]
    return np.asarray(first[rounds] + own, dtype=np.int64)


def _inputs(call: Call, frame: Frame | None = None) -> tuple[Batch, np.ndarray]:
    values = (frame or call.frame).values
    samples, scores = values[call.stage.inputs["samples"]], values[call.stage.inputs["scores"]]
    assert isinstance(samples, Batch)
    assert isinstance(scores, np.ndarray)
    call.metrics.rewards(call.stage.id, scores)
    return samples, scores


def _chosen(samples: Batch, scores: np.ndarray, rows: np.ndarray) -> Batch:
    chosen = samples.select(rows)
    _, groups = np.unique(chosen.array("group"), return_inverse=True)
    return chosen.with_columns(group=groups.astype(np.int64), score=np.asarray(scores, dtype=np.float32)[rows])


def _mixed(samples: Batch, scores: np.ndarray) -> tuple[np.ndarray, int]:
    """Labels of the groups with different scores, ascending, and the number of all groups."""
    groups = samples.array("group")
    labels: list[int] = []
    total = 0
    for members, valid in valid_groups(scores, groups):
        total += 1
        if valid.size and scores[valid].min() != scores[valid].max():
            labels.append(int(groups[members[0]]))
    return np.array(labels, dtype=np.int64), total


def _joined(rounds: list[Batch]) -> Batch:
    if len(rounds) == 1:
        return rounds[0]
    first, parts = 0, []
    for number, batch in enumerate(rounds):
        groups = batch.array("group")
        parts.append(batch.with_columns(group=groups + first, round=np.full(batch.rows, number, dtype=np.int64)))
        first += int(groups.max(initial=-1)) + 1
    return Batch.concat(parts)


def _prompts(call: Call) -> int | None:
    """Prompts that the step takes for this stage; None when it takes all there are."""
    stage = call.stage
    while not isinstance(stage.op, Take):
        port = next(port for port in ("samples", "prompts", "rows") if port in stage.inputs)
        stage = call.state.plan.stage(stage.inputs[port])
    return stage.op.count


def _too_few(op: MixedGroups, kept: int, target: int, seen: int) -> RunFailure:
    share = 100.0 * (seen - kept) / seen if seen else 100.0
    times = f"after {op.refill} refill{'s' * (op.refill != 1)}" if op.refill else "without a refill"
    return RunFailure(
        "RLF5016",
        f"{kept} of {target} groups are left {times}: in {share:.0f} % of {seen} groups all samples score the same",
        help=(
            "raise `refill`, or sample more responses per prompt",
            'or let the step train on fewer groups: on_short = "train"',
        ),
    )
