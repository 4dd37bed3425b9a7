"""When a run is started again, from which step, and what is told. Real deaths are in tests/e2e/test_faults.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlflow.backends.ray_runtime.failures import actor_died, is_echo, is_late, root_cause, stage_failed
from rlflow.backends.ray_runtime.place import PlaceNote
from rlflow.backends.ray_runtime.restarts import Restart, Restarts, is_loss, step_to_resume
from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan
from rlflow.run_record import forget_after, recorded_step
from rlflow.run_rows import json_lines

DEATH = RunFailure("RLF5011", "rank 1 of pool `main` died", notes=("ActorDiedError: killed",))


# --- the policy ------------------------------------------------------------------------------------------------------


def test_a_death_is_restarted_up_to_the_limit() -> None:
    restarts = Restarts(2)
    restarts.after(DEATH, 3)
    restarts.after(DEATH, 4)
    assert restarts.number == 2
    with pytest.raises(RunFailure, match="rank 1 of pool `main` died") as ended:
        restarts.after(DEATH, 5)
    assert ended.value.notes == ("the run was started again 2 times already (--restarts 2)", "ActorDiedError: killed")


def test_the_same_death_at_the_same_step_ends_the_run() -> None:
    restarts = Restarts(10)
    restarts.after(DEATH, 3)
    restarts.after(RunFailure("RLF5011", "rank 0 of pool `main` died"), 3)
    with pytest.raises(RunFailure) as ended:
        restarts.after(DEATH, 3)
    assert ended.value.notes[0] == "the same happened at step 3 before: it would happen again"
    assert restarts.number == 2


def test_no_restarts_when_told_so() -> None:
    with pytest.raises(RunFailure) as ended:
        Restarts(0).after(DEATH, 3)
    assert ended.value is DEATH


@pytest.mark.parametrize(
    "failure",
    [
        RunFailure("RLF5003", "reward `exact` raised"),
        RunFailure("RLF5009", "the loss is NaN"),
        RunFailure("RLF5034", "a device holds more than it may"),
        stage_failed("train", ValueError("a bug")),
    ],
)
def test_what_would_happen_again_is_not_restarted(failure: RunFailure) -> None:
    with pytest.raises(RunFailure) as ended:
        Restarts(5).after(failure, 1)
    assert ended.value is failure


def test_lost_and_late_peers_are_no_faults_of_their_own() -> None:
    closed = stage_failed("train", RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"))
    late = stage_failed("train", RuntimeError("[gloo/...] Timed out waiting 2000ms for recv operation to complete"))
    waited = RunFailure("RLF5019", "rank 0 of pool `learner` waited 2 s for the queue `q`")
    own = stage_failed("score", TimeoutError("the judge timed out"))
    assert (is_echo(closed), is_late(closed)) == (True, False)
    assert (is_echo(late), is_late(late)) == (False, True)
    assert not is_echo(own)
    assert not is_late(own)
    assert all(map(is_loss, (closed, late, waited)))
    assert root_cause([closed, late, waited, own]) is own
    assert root_cause([closed, late]) is late
    queue = actor_died("the queue `samples->learner`", RuntimeError("Worker exit detail: killed. Some common causes"))
    assert root_cause([closed, queue]) is queue
    assert queue.message == "the process of the queue `samples->learner` died"
    assert queue.notes == ("RuntimeError: killed.",)


def test_what_the_user_reads() -> None:
    failure = RunFailure(
        "RLF5011",
        "rank 1 of pool `main` died",
        notes=("it was process 7 on host a", "the log ends with:\nboom", "ActorDiedError: killed"),
    )
    assert Restart(1, 3, failure, step=9, from_step=8).sentence().splitlines() == [
        "rank 1 of pool `main` died, at step 9",
        "  it was process 7 on host a",
        "  ActorDiedError: killed",
        "restart 1 of 3: the run goes on from the checkpoint of step 8",
    ]
    assert "its start: no step is saved" in Restart(1, 3, failure, step=1, from_step=0).sentence()


# --- where it goes on ------------------------------------------------------------------------------------------------


def saved(folder: Path, *steps: int) -> Path:
    for step in steps:
        (folder / f"global_step_{step}").mkdir(parents=True)
        (folder / f"global_step_{step}" / "state.json").write_text("{}", "utf-8")
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{steps[-1]}\n", "utf-8")
    return folder


def test_a_step_that_was_saved_and_not_reported_runs_again(tmp_path: Path, small_plan: Plan) -> None:
    """The process died between its checkpoint and its report."""
    folder = saved(tmp_path, 2, 4, 6)
    assert step_to_resume(folder, 6, small_plan) == 6
    assert step_to_resume(folder, 9, small_plan) == 6
    assert step_to_resume(folder, 5, small_plan) == 4
    assert step_to_resume(folder, None, small_plan) == 6


def test_older_checkpoints_that_were_pruned(tmp_path: Path, small_plan: Plan) -> None:
    """There never was one before the first, so that the run begins anew; later the newest is all there is."""
    save = next(i for program in small_plan.programs for i in program.step if i.kind == "checkpoint")
    every = save.every or 1
    assert step_to_resume(saved(tmp_path / "a", every), 0, small_plan) is None
    assert step_to_resume(saved(tmp_path / "b", 10 * every), 3, small_plan) == 10 * every
    assert step_to_resume(tmp_path / "none", 3, small_plan) is None


def rows(path: Path, *steps: int, evaluations: tuple[int, ...] = ()) -> None:
    found = [{"step": step, "data": {"training/global_step": step}} for step in steps]
    found += [{"step": step, "data": {"val/held/right/mean": 0.5}} for step in evaluations]
    path.write_text("".join(json.dumps(row) + "\n" for row in found), "utf-8")


def test_an_evaluation_that_is_missing_makes_its_step_run_again(tmp_path: Path, small_plan: Plan) -> None:
    file = tmp_path / "metrics.jsonl"
    assert recorded_step(small_plan, file, None) is None
    program = small_plan.programs[0]
    held = program.evaluations[0].model_copy(update={"name": "held", "every": 2})
    programs = (program.model_copy(update={"evaluations": (held,)}),)
    plan = small_plan.model_copy(update={"programs": programs})
    rows(file, 1, 2, 3, evaluations=(0, 2))
    assert recorded_step(plan, file, None) == 3
    assert recorded_step(plan, file, 3) == 2, "all evaluations follow the last step"
    rows(file, 1, 2, evaluations=(0,))
    assert recorded_step(plan, file, None) == 1


def test_what_runs_again_is_taken_back_and_kept_aside(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    trace = tmp_path / "trace" / "main-0.jsonl"
    for done in (2, 0):
        rows(tmp_path / "metrics.jsonl", 1, 2, 3, evaluations=(0, 2))
        trace.write_text('{"step": 0}\n{"step": 2}\n{"step": 3}\n{"st', "utf-8")
        forget_after(tmp_path, done)
        assert [row["step"] for row in json_lines(tmp_path / "metrics.jsonl")] == ([1, 2, 0, 2] if done else [])
        assert [event["step"] for event in json_lines(trace)] == ([0, 2] if done else [])
    aside = [(row["try"], row["step"]) for row in json_lines(tmp_path / "discarded.jsonl")]
    assert aside == [(1, 3), (2, 1), (2, 2), (2, 3), (2, 0), (2, 2)]


def test_a_rank_says_where_it_is() -> None:
    note = PlaceNote()
    assert note.read().sentence() == "before its first instruction for 0 s"
    note.begin()
    note.at(7, "run:samples")
    before = note.read()
    assert before.sentence() == "in `run:samples` of step 7 for 0 s"
    assert before.cpu_s is not None
    sum(range(10_000_000))
    after = note.read().cpu_s
    assert after is not None
    assert after > before.cpu_s
