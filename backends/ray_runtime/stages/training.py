"""The train stage: from columns to the trainer's arguments."""

from __future__ import annotations

import numpy as np
import torch

from rlflow.backends.ray_runtime.algorithms.moments import moments
from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.stages.call import Call, Value, counted_tokens, rows_with_nan, token_count
from rlflow.backends.ray_runtime.stages.replicas import together
from rlflow.backends.ray_runtime.stages.selection import numbers_in_batch
from rlflow.backends.ray_runtime.streams.ages import check_ages
from rlflow.ir.ops import Generate, Join, Train

_TOKEN_PORTS = ("reference", "old", "teacher", "returns", "values")


def train(call: Call, op: Train) -> Value:
    """Ports: samples; advantages (per row or per token), reference, old, teacher, returns, values (per token), weights
    (per row), as the loss needs them. A sample with a NaN in any of them is in no loss, metric or denominator."""
    samples = call.batch("samples")
    check_ages(call.state.plan, op.model, samples, call.step, call.state.rank)
    model = call.model(op.model)
    trainer = model.trainer
    assert trainer is not None
    mask = counted_tokens(samples)
    missing = np.zeros(samples.rows, dtype=bool)
    advantages = call.column("advantages") if call.has("advantages") else None
    weights = call.per_row("weights") if call.has("weights") else None
    tokens: dict[str, Packed] = {port: call.per_token(port) for port in _TOKEN_PORTS if call.has(port)}
    for column in (advantages, weights, tokens.get("returns")):
        if column is not None:
            missing |= np.isnan(column) if isinstance(column, np.ndarray) else rows_with_nan(column, mask)
    if missing.any():
        call.metrics.sums["training/samples_without_reward"] += float(missing.sum())
    numbers = numbers_in_batch(call, samples)
    if model.mesh is not None and numbers is None:
        numbers = _consecutive(call, samples.rows)
    replica = together(model.mesh, samples, advantages, weights, missing, numbers, *tokens.values())
    call.metrics.waited(call.state.before_update(op.model))
    _count_ages(call, op, samples)
    dropped = replica.column(3)
    found = trainer.train(
        replica.rows(),
        replica.column(1),
        op,
        seed=call.state.seed,
        step=call.step,
        row_weights=replica.column(2),
        counted=~dropped if dropped.any() else None,
        group=call.state.group if model.mesh is None else model.mesh.dp,
        rows=replica.column(4),
        **{port: replica.column(5 + index) for index, port in enumerate(tokens)},
    )
    if "returns" in tokens and "values" in tokens:
        found |= _explained_variance(call, samples, tokens["returns"], tokens["values"], missing)
    call.metrics.training(_named(call, op, found))
    call.tokens = token_count(samples)
    return None


def _count_ages(call: Call, op: Train, samples: Batch) -> None:
    """How old the samples are, where the trained model made them: others have no age of it."""
    stage = call.state.plan.stage(call.stage.inputs["samples"])
    while not isinstance(stage.op, Generate | Join):
        port = next((port for port in ("samples", "rows") if port in stage.inputs), None)
        if port is None:
            return
        stage = call.state.plan.stage(stage.inputs[port])
    made = stage if isinstance(stage.op, Generate) else call.state.plan.stage(next(iter(stage.inputs.values())))
    if isinstance(made.op, Generate) and made.op.model == op.model and "version" in samples.columns:
        call.metrics.ages(stage.id, call.model(op.model).version - samples.array("version"))


def _consecutive(call: Call, rows: int) -> np.ndarray:
    """Numbers of this rank's rows in the whole batch, where ranks hold consecutive parts. All ranks must call."""
    counts = call.over_ranks([float(rows)])[:, 0].astype(np.int64)
    first = int(counts[: call.state.rank].sum())
    return np.arange(first, first + rows)


def _explained_variance(
    call: Call, samples: Batch, returns: Packed, values: Packed, missing: np.ndarray
) -> dict[str, float]:
    """1 - Var(returns - values) / Var(returns) over all ranks' counted tokens, of the values before the update."""
    counted = torch.from_numpy(~missing)[returns.row_ids()]
    mask = counted_tokens(samples)
    if mask is not None:
        counted &= mask > 0
    whole = call.merged(moments(returns.values, counted))
    rest = call.merged(moments(returns.values - values.values, counted))
    if not whole.variance:
        return {}
    return {"critic/vf_explained_var": 1.0 - rest.variance / whole.variance}


def _named(call: Call, op: Train, found: dict[str, float]) -> dict[str, float]:
    """Where several models of one family are trained, a metric says which: actor/NAME/loss."""
    trained = {stage.op.model for stage in call.state.plan.stages if isinstance(stage.op, Train)}
    family = _family(call, op.model)
    if sum(_family(call, name) == family for name in trained) < 2:
        return found
    return {name.replace("/", f"/{op.model}/", 1): value for name, value in found.items()}


def _family(call: Call, model: str) -> str:
    return "critic" if call.state.plan.model(model).source.kind == "value" else "actor"
