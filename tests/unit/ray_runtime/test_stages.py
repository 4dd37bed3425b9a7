"""Stages on columns against the pure functions, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlflow.backends.ray_runtime.algorithms.gae import gae as pure_gae
from rlflow.backends.ray_runtime.algorithms.moments import whiten
from rlflow.backends.ray_runtime.algorithms.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from rlflow.backends.ray_runtime.algorithms.shaping import score_at_end
from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.measure import StepMetrics
from rlflow.backends.ray_runtime.stages import RUN
from rlflow.backends.ray_runtime.stages.call import Call, Frame, Value
from rlflow.backends.ray_runtime.state import RankState
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import (
    Combine,
    FieldOf,
    Gae,
    GroupNormalize,
    KlReward,
    Op,
    Overlong,
    ReinforcePp,
    Remax,
    Rloo,
)
from rlflow.plan import Because, Plan, Pool, Program, RankPlace, Source, Stage, Stop
from rlflow.plan_parts import SpanRef

SPAN = SpanRef(file="a.rlflow", line=1, column=1, end_line=1, end_column=2)
BECAUSE = Because(reason="written", span=SPAN)
NAN = float("nan")


def stage(id: str, op: Op, **inputs: str) -> Stage:
    return Stage(id=id, op=op, phase="step", pool="main", inputs=inputs, output="", because=BECAUSE)


def plan_of(stages: list[Stage]) -> Plan:
    return Plan(
        rlflow_version="0",
        flow="test",
        cluster="local",
        sources=(Source(path="a.rlflow", sha256="0"),),
        pipeline="",
        seed=0,
        stop=Stop(steps=1, epochs=None),
        data=(),
        models=(),
        rewards=(),
        pools=(Pool(name="main", device="cpu", ranks=(RankPlace(rank=0, host="local", index=0),)),),
        stages=tuple(stages),
        programs=(Program(pool="main", step=()),),
        channels=(),
    )


# --- one stage ------------------------------------------------------------------------------------------------------

LENGTHS = [3, 2, 4, 1, 2, 5, 1, 2]
TOKENS = sum(LENGTHS)
SAMPLES = Batch(
    8,
    {
        "uid": np.repeat([30, 10, 20, 40], 2),
        "group": np.repeat(np.arange(4), 2),
        "sample": np.tile(np.arange(2), 4),
        "prompt_ids": Packed.from_rows([[1, 2]] * 8, torch.int64),
        "response_ids": Packed.from_rows([[5] * n for n in LENGTHS], torch.int64),
        "logprobs": Packed.from_rows([[-0.5 * (i + 1)] * n for i, n in enumerate(LENGTHS)], torch.float32),
        "truncated": np.array([True, False] * 4),
    },
)
OFFSETS = SAMPLES.packed("response_ids").offsets
LENGTH_TENSOR = SAMPLES.packed("response_ids").lengths
SCORES = np.array([1.0, 0.0, 0.5, 0.25, 2.0, 2.0, -1.0, 3.0], dtype=np.float32)
MASK = torch.ones(TOKENS, dtype=torch.int64)
MASK[[1, 6, 7, 12]] = 0
MASKED = SAMPLES.with_columns(mask=Packed(MASK, OFFSETS))


def execute(
    op: Op, group: dist.ProcessGroup | None = None, rank: int = 0, **inputs: tuple[Value, Batch]
) -> tuple[Any, StepMetrics]:
    """Run one stage on (value, the rows it belongs to) by port."""
    plan = plan_of([stage("it", op, **{port: port for port in inputs})])
    state = RankState(plan, "main", rank, 1, Path(), seed=0, group=group)
    frame = Frame()
    for port, (value, rows) in inputs.items():
        frame.values[port], frame.rows[port] = value, rows
    metrics = StepMetrics(plan, "main", rank)
    call = Call(plan.stages[0], state, 1, metrics, frame, lambda _: frame)
    return RUN[op.kind](call, op), metrics


def packed(values: torch.Tensor) -> Packed:
    return Packed(values, OFFSETS)


def per_token(row_values: np.ndarray) -> torch.Tensor:
    return torch.repeat_interleave(torch.from_numpy(row_values.astype(np.float32)), LENGTH_TENSOR)


def test_combine_adds_columns_of_both_kinds() -> None:
    other = np.arange(8.0)
    found, _ = execute(Combine(weights=(2.0, -1.0), constant=0.5), c0=(SCORES, SAMPLES), c1=(other, SAMPLES))
    np.testing.assert_allclose(found, 2.0 * SCORES - other + 0.5)
    tokens = packed(torch.arange(float(TOKENS)))
    found, _ = execute(Combine(weights=(0.5, 3.0)), c0=(tokens, SAMPLES), c1=(SCORES, SAMPLES))
    torch.testing.assert_close(found.values, 0.5 * tokens.values + 3.0 * per_token(SCORES))
    missing = SCORES.copy()
    missing[2] = NAN
    found, _ = execute(Combine(weights=(1.0, 0.0)), c0=(other, SAMPLES), c1=(missing, SAMPLES))
    assert np.isnan(found).tolist() == [False, False, True, False, False, False, False, False]


def test_fields_of_rows() -> None:
    found, _ = execute(FieldOf(field="truncated"), rows=(SAMPLES, SAMPLES))
    assert found.tolist() == [1.0, 0.0] * 4
    found, _ = execute(FieldOf(field="logprobs"), rows=(SAMPLES, SAMPLES))
    assert found is SAMPLES.packed("logprobs")


def test_overlong_counts_all_tokens_after_the_prompt() -> None:
    found, _ = execute(Overlong(limit=4, buffer=2), samples=(MASKED, MASKED))
    assert found.tolist() == [-0.5, 0.0, -1.0, 0.0, 0.0, -1.0, 0.0, 0.0]


def test_a_sample_without_a_reward_is_in_no_group() -> None:  # K5
    scores = np.array([1.0, NAN, 0.0, 1.0, NAN, NAN, 0.0, 0.0])
    groups = SAMPLES.with_columns(group=np.array([0, 0, 0, 1, 1, 2, 3, 3]))
    found, metrics = execute(GroupNormalize(std=False), scores=(scores, groups))
    np.testing.assert_array_equal(found, [0.5, NAN, -0.5, 0.0, NAN, NAN, 0.0, 0.0])
    assert metrics.sums["critic/skipped_groups"] == 1
    assert metrics.means["critic/advantages/mean"] == (0.0, 5)


def test_rloo() -> None:
    found, _ = execute(Rloo(), scores=(SCORES, SAMPLES))
    np.testing.assert_allclose(found, [1.0, -1.0, 0.25, -0.25, 0.0, 0.0, -4.0, 4.0])
    scores = SCORES.copy()
    scores[0] = NAN
    found, metrics = execute(Rloo(), scores=(scores, SAMPLES))
    assert np.isnan(found[:2]).all()  # the other one has nothing to compare with
    assert metrics.sums["critic/skipped_groups"] == 1


def test_remax_joins_the_greedy_reward_by_prompt() -> None:
    greedy = Batch(4, {"uid": np.array([10, 20, 30, 40])})
    baseline = np.array([0.1, 0.2, 0.3, NAN])
    found, _ = execute(Remax(), scores=(SCORES, SAMPLES), baseline=(baseline, greedy))
    np.testing.assert_allclose(found, SCORES - np.repeat([0.3, 0.1, 0.2, NAN], 2), atol=1e-6)
    with pytest.raises(ValueError, match="no sample of the prompt with uid 40"):
        execute(Remax(), scores=(SCORES, SAMPLES), baseline=(baseline[:3], greedy.select([0, 1, 2])))
    with pytest.raises(ValueError, match="several samples"):
        execute(Remax(), scores=(SCORES, SAMPLES), baseline=(baseline, greedy.with_columns(uid=np.array([10] * 4))))


@pytest.mark.parametrize("rows", [SAMPLES, MASKED])
def test_reinforce_pp_is_whitened_over_the_tokens(rows: Batch) -> None:
    mask = MASK if rows is MASKED else None
    counted = MASK > 0 if rows is MASKED else torch.ones(TOKENS, dtype=torch.bool)
    placed = score_at_end(torch.from_numpy(SCORES), LENGTH_TENSOR, mask)
    expected = reinforce_pp(placed, LENGTH_TENSOR, mask=mask)
    found, _ = execute(ReinforcePp(), scores=(SCORES, rows))
    torch.testing.assert_close(per_token(found)[counted], expected[counted])
    expected = reinforce_pp_baseline(SCORES, SAMPLES.array("group"), LENGTH_TENSOR, mask=mask)
    found, _ = execute(ReinforcePp(baseline=True), scores=(SCORES, rows))
    torch.testing.assert_close(per_token(found)[counted], expected[counted])
    tokens, _ = execute(ReinforcePp(), scores=(packed(placed + 0.1), rows))
    expected = reinforce_pp(placed + 0.1, LENGTH_TENSOR, mask=mask)
    torch.testing.assert_close(tokens.values, expected)


def test_reinforce_pp_without_some_rewards() -> None:
    scores = SCORES.copy()
    scores[3] = NAN
    found, _ = execute(ReinforcePp(), scores=(scores, SAMPLES))
    kept = np.flatnonzero(~np.isnan(scores))
    few = SAMPLES.select(kept)
    expected, _ = execute(ReinforcePp(), scores=(SCORES[kept], few))
    assert np.isnan(found[3])
    np.testing.assert_allclose(found[kept], expected, rtol=1e-6)


@pytest.mark.parametrize("rows", [SAMPLES, MASKED])
@pytest.mark.parametrize("per", ["row", "token"])
def test_gae_is_the_formula(rows: Batch, per: str) -> None:
    mask = MASK if rows is MASKED else None
    values = torch.linspace(-1, 1, TOKENS)
    rewards = score_at_end(torch.from_numpy(SCORES), LENGTH_TENSOR, mask)
    given: Any = SCORES
    if per == "token":
        rewards = rewards - 0.01
        given = packed(rewards)
    expected = pure_gae(rewards, values, LENGTH_TENSOR, gamma=0.9, lam=0.8, mask=mask)
    inputs = {"rewards": (given, rows), "values": (packed(values), rows)}
    found, metrics = execute(Gae(gamma=0.9, lam=0.8, whiten=False), **inputs)
    torch.testing.assert_close(found.values, expected.advantages)
    assert "critic/advantages/mean" in metrics.means
    found, _ = execute(Gae(gamma=0.9, lam=0.8), **inputs)
    torch.testing.assert_close(found.values, whiten(expected.advantages, mask))
    found, metrics = execute(Gae(gamma=0.9, lam=0.8, whiten=True, output="returns"), **inputs)
    torch.testing.assert_close(found.values, expected.returns)
    assert "critic/returns/mean" in metrics.means


def test_gae_leaves_out_samples_without_a_reward() -> None:
    scores = SCORES.copy()
    scores[2] = NAN
    values = torch.linspace(-1, 1, TOKENS)
    found, _ = execute(Gae(), rewards=(scores, SAMPLES), values=(packed(values), SAMPLES))
    kept = [0, 1, 3, 4, 5, 6, 7]
    few = SAMPLES.select(kept)
    expected, _ = execute(Gae(), rewards=(SCORES[kept], few), values=(packed(values).select(kept), few))
    assert torch.isnan(found.row(2)).all()
    torch.testing.assert_close(found.select(kept).values, expected.values)


def test_kl_reward_is_the_score_minus_the_penalty() -> None:
    reference = packed(SAMPLES.packed("logprobs").values - 0.25)
    inputs = {"scores": (SCORES, SAMPLES), "samples": (SAMPLES, SAMPLES), "reference": (reference, SAMPLES)}
    found, metrics = execute(KlReward(weight=0.4), **inputs)
    expected = score_at_end(torch.from_numpy(SCORES), LENGTH_TENSOR) - 0.4 * 0.25
    torch.testing.assert_close(found.values, expected)
    assert metrics.means["actor/reward_kl_penalty"] == pytest.approx((0.25 * TOKENS, TOKENS))
    # A token of an environment has no penalty, whatever the models say there (I5).
    poisoned = packed(torch.where(MASK > 0, reference.values, NAN))
    inputs |= {"samples": (MASKED, MASKED), "reference": (poisoned, MASKED)}
    found, metrics = execute(KlReward(weight=0.4), **inputs)
    assert (found.values[MASK == 0] == 0).all()
    assert metrics.means["actor/reward_kl_penalty"][1] == int(MASK.sum())
    scores = SCORES.copy()
    scores[1] = NAN
    found, _ = execute(KlReward(weight=0.4), **{**inputs, "scores": (scores, MASKED)})
    assert torch.isnan(found.row(1)).all()
    with pytest.raises(RunFailure, match="not finite") as failure:
        execute(KlReward(weight=0.4), **{**inputs, "samples": (SAMPLES, SAMPLES)})
    assert failure.value.code == "RLF5009"


# --- over ranks -------------------------------------------------------------------------------------------------------

VALUES = torch.linspace(-1, 1, TOKENS)


def _parts(group: dist.ProcessGroup | None, mine: list[int]) -> list[Any]:
    rows = MASKED.select(mine)
    scores = SCORES.copy()
    scores[3] = NAN
    given = (scores[mine], rows)
    values = (packed(VALUES).select(mine), rows)
    return [
        execute(ReinforcePp(), group=group, scores=given)[0],
        execute(ReinforcePp(baseline=True), group=group, scores=given)[0],
        execute(Gae(), group=group, rewards=given, values=values)[0].values.numpy(),
    ]


def _rank(rank: int, store: str, mine: list[int], out: Any = None) -> list[Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = _parts(dist.group.WORLD, mine)
    if out is not None:
        out.put(found)
    dist.destroy_process_group()
    return found


def test_whitening_is_over_all_ranks(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    queue = context.Queue()
    other = context.Process(target=_rank, args=(1, str(tmp_path / "store"), [2, 3, 4, 5, 6, 7], queue))
    other.start()
    first = _rank(0, str(tmp_path / "store"), [0, 1])
    second = queue.get(timeout=60)
    other.join(60)
    for mine, theirs, whole in zip(first, second, _parts(None, list(range(8))), strict=True):
        np.testing.assert_allclose(np.concatenate([mine, theirs]), whole, rtol=1e-6, atol=1e-7)
