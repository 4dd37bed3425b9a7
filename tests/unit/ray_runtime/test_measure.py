from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.measure import StepMetrics, reduce_parts
from rlflow.plan import Plan


def samples(lengths: list[int], truncated: list[bool]) -> Batch:
    return Batch(
        len(lengths),
        {
            "prompt_ids": Packed.from_rows([[1, 2]] * len(lengths), torch.int64),
            "response_ids": Packed.from_rows([[3] * n for n in lengths], torch.int64),
            "truncated": np.array(truncated, dtype=bool),
        },
    )


def test_ranks_reduce_to_the_mean_over_all_rows(small_plan: Plan) -> None:
    """Unequal numbers of rows: not the mean of the ranks' means."""
    parts = []
    for scores in ([1.0], [0.0, 0.0, 0.0, 2.0, 0.0]):
        metrics = StepMetrics(small_plan, "main", 0)
        metrics.scores("points", np.array(scores, np.float32))
        metrics.samples(samples([len(scores)] * len(scores), [True] + [False] * (len(scores) - 1)))
        metrics.seconds["gen"] += len(scores)
        parts.append(metrics.parts())
    data = reduce_parts(parts)
    assert data["critic/score/mean"] == pytest.approx(0.5)
    assert (data["critic/score/max"], data["critic/score/min"]) == (2.0, 0.0)
    assert data["response_length/clip_ratio"] == pytest.approx(2 / 6)
    assert data["response_length/mean"] == pytest.approx((1 + 25) / 6)
    assert data["perf/total_num_tokens"] == 1 + 25 + 2 * 6
    assert data["timing_s/gen"] == 5  # the slowest rank


def test_samples_without_a_score_do_not_count(small_plan: Plan) -> None:
    metrics = StepMetrics(small_plan, "main", 0)
    metrics.scores("points", np.array([1.0, math.nan, 0.0], np.float32), {"exact": [True, None, False]})
    data = reduce_parts([metrics.parts()])
    assert data["critic/score/mean"] == 0.5
    assert data["reward_extra/points/exact/mean"] == 0.5
    assert all(math.isfinite(value) for value in data.values())


def test_a_rank_without_rows(small_plan: Plan) -> None:
    full, empty = (StepMetrics(small_plan, "main", rank, "held") for rank in (0, 1))
    full.samples(samples([3], [False]))
    full.scores("held.right", np.array([1.0], np.float32))
    empty.samples(samples([], []))
    empty.scores("held.right", np.array([], np.float32))
    data = reduce_parts([full.parts(), empty.parts()])
    assert data["right/mean"] == 1.0
    assert data["response_length/mean"] == 3.0
    assert reduce_parts([empty.parts()]).keys() == {"perf/total_num_tokens"}


def test_times_have_verls_names(small_plan: Plan) -> None:
    metrics = StepMetrics(small_plan, "main", 0)
    for instruction in small_plan.programs[0].step:
        metrics.instruction(instruction, 1, 10.0, 11.0, None, None)
    assert metrics.parts()["seconds"] == {
        "gen": 1.0, "reward": 2.0, "ref": 1.0, "adv": 1.0, "update_actor": 1.0, "update_weights": 1.0,
        "save_checkpoint": 1.0,
    }  # fmt: skip


def test_an_asynchronous_call_is_an_event_of_its_own_pool(small_plan: Plan) -> None:
    metrics = StepMetrics(small_plan, "main", 0)
    metrics.call(small_plan.stage("points"), 3, 1.0, 1.5)
    assert metrics.events == [
        {
            "pool": "cpu", "rank": 0, "instruction": "call:points", "stage": "points", "kind": "call", "step": 3,
            "start_us": 1_000_000, "duration_us": 500_000, "version": None, "result_us": 500_000,
        }
    ]  # fmt: skip
    metrics.call(small_plan.stage("points"), 3, 1.0, 1.5, ended=1.2)
    metrics.call(small_plan.stage("points"), 3, 1.0, 1.5, ended=9.9)  # by another host's clock
    assert [event["result_us"] for event in metrics.events[1:]] == [200_000, 500_000]
