"""Arithmetic on columns."""

from __future__ import annotations

import numpy as np
import torch

from rlflow.backends.ray_runtime.algorithms.kl import kl_estimate
from rlflow.backends.ray_runtime.algorithms.rows import blank
from rlflow.backends.ray_runtime.algorithms.shaping import score_at_end, soft_overlong_penalty, with_kl_penalty
from rlflow.backends.ray_runtime.batch import Packed
from rlflow.backends.ray_runtime.stages.call import Call, counted_tokens, spread
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Combine, FieldOf, KlReward, Overlong


def combine(call: Call, op: Combine) -> np.ndarray | Packed:
    """Float64 per row, or float32 per token when any column is per token: rows' numbers then stand at every token."""
    columns = [call.column(f"c{index}") for index in range(len(op.weights))]
    packed = next((column for column in columns if isinstance(column, Packed)), None)
    if packed is None:
        total = np.full(call.rows_of("c0").rows, op.constant, dtype=np.float64)
        for weight, column in zip(op.weights, columns, strict=True):
            total += weight * np.asarray(column, dtype=np.float64)
        return total
    values = torch.full_like(packed.values, op.constant, dtype=torch.float64)
    for weight, column in zip(op.weights, columns, strict=True):
        values += weight * (column.values if isinstance(column, Packed) else spread(column, packed))
    return Packed(values.float(), packed.offsets)


def field_of(call: Call, op: FieldOf) -> np.ndarray | Packed:
    column = call.batch("rows").columns[op.field]
    assert not isinstance(column, list), f"`{op.field}` is not a column of numbers"
    return column if isinstance(column, Packed) else column.astype(np.float64)


def kl_reward(call: Call, op: KlReward) -> Packed:
    """A sample whose score is NaN is NaN at every token."""
    samples = call.batch("samples")
    mask = counted_tokens(samples)
    policy, reference = samples.packed("logprobs"), call.per_token("reference")
    kl = blank(kl_estimate(policy.values, reference.values, "k1"), mask)
    if not torch.isfinite(kl).all():
        raise RunFailure("RLF5009", "a log-probability of the policy or the reference is not finite")
    scores = torch.from_numpy(call.per_row("scores").astype(np.float32))
    rewards = with_kl_penalty(score_at_end(scores, policy.lengths, mask), kl, coefficient=op.weight, mask=mask)
    missing = torch.repeat_interleave(torch.isnan(scores), policy.lengths)
    call.metrics.rewards(call.stage.id, call.per_row("scores"))
    call.metrics.mean("actor/reward_kl_penalty", (kl if mask is None else kl[mask > 0]).numpy())
    return Packed(torch.where(missing, float("nan"), rewards), policy.offsets)


def overlong(call: Call, op: Overlong) -> np.ndarray:
    lengths = call.batch("samples").packed("response_ids").lengths.numpy()
    return soft_overlong_penalty(lengths, limit=op.limit, buffer=op.buffer)
