from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlflow.backends.ray_runtime.execute import Interpreter
from rlflow.backends.ray_runtime.measure import StepMetrics
from rlflow.backends.ray_runtime.state import RankState
from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan

NewState = Callable[..., RankState]


def run(state: RankState, steps: int, saved: list[int] | None = None) -> list[StepMetrics]:
    interpreter = Interpreter(state, (saved if saved is not None else []).append)
    out = []
    for step in range(1, steps + 1):
        out.append(StepMetrics(state.plan, "main", state.rank))
        interpreter.run(state.plan.programs[0].step, step, out[-1])
    return out


def test_every_instruction_runs_in_the_plans_order(new_state: NewState, small_plan: Plan) -> None:
    saved: list[int] = []
    metrics = run(new_state(), 5, saved)
    ids = [i.id for i in small_plan.programs[0].step]
    kinds = {i.id: i.kind for i in small_plan.programs[0].step}
    for step, measured in enumerate(metrics, start=1):
        expected = [i for i in ids if kinds[i] != "checkpoint" or step % 2 == 0]
        assert [e["instruction"] for e in measured.events if e["kind"] != "call"] == expected
        assert all(event["step"] == step and event["duration_us"] >= 0 for event in measured.events)
    assert saved == [2, 4]


def test_samples_carry_the_version_that_made_them(new_state: NewState) -> None:
    state = new_state()
    run(state, 3)
    reward: Any = state.rewards["exact"]
    assert [set(batch.array("version").tolist()) for batch in reward.batches] == [{0}, {1}, {2}]
    assert state.models["actor"].version == 3
    assert state.models["reference"].version == 0


def test_training_changes_the_actor_and_not_its_frozen_copy(new_state: NewState) -> None:
    state, start = new_state(), new_state()
    run(state, 1)
    for name, changed in (("actor", True), ("reference", False)):
        pairs = zip(
            state.models[name].loaded.model.parameters(), start.models[name].loaded.model.parameters(), strict=True
        )
        assert any(not torch.equal(a, b) for a, b in pairs) is changed, name


def test_the_cursor_moves_over_epochs(new_state: NewState) -> None:
    state = new_state()
    run(state, 3)
    reward: Any = state.rewards["exact"]
    uids = [uid for batch in reward.batches for uid in batch.array("uid")[::4].tolist()]
    assert uids == list(range(9))  # four rows, three a step
    assert state.cursors == {"questions": 9}


def test_ranks_take_consecutive_parts(new_state: NewState, small_plan: Plan) -> None:
    taken: list[int] = []
    for rank in range(3):
        state = new_state(rank, 3)
        interpreter = Interpreter(state, lambda step: None)
        metrics = StepMetrics(small_plan, "main", rank)
        interpreter.run(small_plan.programs[0].step[:3], 1, metrics)
        reward: Any = state.rewards["exact"]
        taken += reward.batches[0].array("uid")[::4].tolist()
        assert state.cursors == {"questions": 3}
    assert taken == [0, 1, 2]


def test_an_evaluation_splits_rows_that_do_not_divide(new_state: NewState, small_plan: Plan) -> None:
    evaluation = small_plan.programs[0].evaluations[0]
    rows = []
    for rank in range(5):  # four rows: the last rank has none
        state = new_state(rank, 5)
        Interpreter(state, lambda step: None).run(
            evaluation.instructions, 0, StepMetrics(small_plan, "main", rank, evaluation.name)
        )
        reward: Any = state.rewards["exact"]
        rows.append(reward.batches[0].array("uid").tolist())
    assert rows == [[0], [1], [2], [3], []]


def test_a_failure_names_its_stage(new_state: NewState) -> None:
    def broken(text: str) -> float:
        raise KeyError("boom")

    with pytest.raises(RunFailure) as failure:
        run(new_state(score=broken), 1)
    assert (failure.value.code, failure.value.stage) == ("RLF5006", "points")
    assert failure.value.notes == ("KeyError: 'boom'",)
    assert "in broken" in failure.value.trace


def test_equal_rewards_leave_the_weights_to_the_kl_term(new_state: NewState) -> None:
    metrics = run(new_state(score=lambda text: 1.0), 1)[0]
    assert metrics.means["critic/advantages/mean"][0] == 0
    assert metrics.means["actor/pg_loss"][0] == pytest.approx(0, abs=1e-7)


def test_extras_of_a_reward_are_measured(new_state: NewState) -> None:
    metrics = run(new_state(), 1)[0]
    assert metrics.means["reward_extra/points/short/mean"][1] == 12
    assert not any("note" in name for name in metrics.means)


def test_nothing_is_kept_after_its_last_reader(new_state: NewState, small_plan: Plan) -> None:
    state = new_state()
    interpreter = Interpreter(state, lambda step: None)
    interpreter.run(small_plan.programs[0].step, 1, StepMetrics(small_plan, "main", 0))
    assert interpreter._values == {}
