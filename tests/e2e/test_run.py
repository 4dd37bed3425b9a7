"""Whole runs on Ray: what they leave behind, that they repeat, and that they go on where they stopped."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import pytest

from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def same_weights(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(bool((a[name] == b[name]).all()) for name in a)


# --- the run folder --------------------------------------------------------------------------------------------------


def test_plan_and_facts(full_run: Any) -> None:
    plan = Plan.from_json((full_run.folder / "plan.json").read_text("utf-8"))
    facts = full_run.facts
    assert (facts["flow"], facts["status"], facts["steps"], facts["seed"]) == (plan.flow, "finished", 4, 0)
    assert facts["data"]["questions"]["rows"] == 11
    assert facts["parameters"]["actor"] == facts["parameters"]["reference"] > 0
    assert {"rlflow", "python", "ray", "torch", "transformers"} <= facts["versions"].keys()


def test_metrics(full_run: Any) -> None:
    kinds = [(row["step"], "training/global_step" in row["data"]) for row in full_run.rows]
    assert kinds == [(0, False), (1, True), (2, True), (2, False), (3, True), (4, True), (4, False)]
    step = full_run.rows[1]["data"]
    names = {
        "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "actor/lr", "actor/ppo_kl",
        "critic/score/mean", "critic/score/max", "critic/advantages/mean", "response_length/mean",
        "response_length/clip_ratio", "prompt_length/max", "perf/throughput", "perf/total_num_tokens",
        "timing_s/gen", "timing_s/ref", "timing_s/reward", "timing_s/adv", "timing_s/update_actor", "timing_s/step",
        "reward_extra/points/exact/mean",
    }  # fmt: skip
    assert names <= step.keys()
    assert {"val/held/right/mean", "val/held/right/exact/mean"} <= full_run.rows[0]["data"].keys()
    assert all(isinstance(value, float) for row in full_run.rows for value in row["data"].values())


def test_trace(full_run: Any) -> None:
    from rlflow.backends.visualizers.trace_rules import validate_trace

    plan = Plan.from_json((full_run.folder / "plan.json").read_text("utf-8"))
    trace = json.loads((full_run.folder / "trace.json").read_text("utf-8"))
    assert validate_trace(trace) == []
    rows = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"]
    assert rows == ["rank 0", "worker 0"]
    program = plan.programs[0]
    for step in range(1, 5):
        held = program.evaluations[0].instructions if step in (2, 4) else ()
        expected = [i.id for i in (*program.step, *held) if i.kind != "checkpoint" or step in (2, 4)]
        done = [e["instruction"] for e in full_run.events() if e["step"] == step and e["kind"] != "call"]
        assert done == expected


def test_versions(full_run: Any) -> None:
    """A rollout uses the weights that the step before it published."""
    generated = [(e["step"], e["version"]) for e in full_run.events() if e["stage"] == "samples"]
    assert generated == [(step, step - 1) for step in range(1, 5)]
    answered = [(e["step"], e["version"]) for e in full_run.events() if e["stage"] == "held.answers"]
    assert answered == [(0, 0), (2, 2), (4, 4)]


def test_learning_curve(full_run: Any) -> None:
    root = ElementTree.fromstring((full_run.folder / "learning_curve.svg").read_text("utf-8"))
    assert root.tag.endswith("svg")


def test_checkpoints(full_run: Any) -> None:
    folders = sorted(path.name for path in (full_run.folder / "checkpoints").iterdir())
    assert folders == ["global_step_2", "global_step_4", "latest_checkpointed_iteration.txt"]
    assert not same_weights(full_run.weights(2), full_run.weights(4))
    assert full_run.rows[1]["data"]["actor/grad_norm"] > 0


def test_the_checkpoint_loads_with_transformers_and_answers_as_the_run_did(full_run: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = full_run.checkpoint(4) / "actor"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for seen in full_run.seen[-5:]:  # the last evaluation: greedy answers to held-out questions
        prompt = seen[: seen.index("=") + 1]
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=3, do_sample=False)[0]
        assert tokenizer.decode(ids, skip_special_tokens=True) == seen


# --- repetition ------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run(full_run: Any, project: Any) -> None:
    again = project.run("again")
    assert again.metrics == full_run.metrics
    assert again.seen == full_run.seen
    assert same_weights(again.weights(4), full_run.weights(4))


def test_another_seed_gives_another_run(full_run: Any, project: Any) -> None:
    other = project.run("other", steps=2, seed=1)
    assert other.trained_steps == [1, 2]
    assert other.facts["seed"] == 1
    assert other.seen[:5] == full_run.seen[:5]  # the first evaluation is greedy
    assert other.seen[5:21] != full_run.seen[5:21]
    assert not same_weights(other.weights(2), full_run.weights(2))


def test_no_steps_is_an_evaluation(full_run: Any, project: Any) -> None:
    run = project.run("run", steps=0)
    assert run.metrics == full_run.metrics[:1]
    assert list((run.folder / "checkpoints").iterdir()) == []
    assert run.facts["status"] == "finished"


# --- going on --------------------------------------------------------------------------------------------------------


def test_resuming_gives_the_uninterrupted_run(full_run: Any, project: Any) -> None:
    first = project.run("run", steps=1)
    second = project.run("run", steps=3, resume=True)
    last = project.run("run", steps=4, resume=True)
    # The last five of a part are the evaluation at its end, which the uninterrupted run has after even steps only.
    assert first.seen[:-5] + second.seen[:-5] + last.seen == full_run.seen
    assert last.trained_steps == [1, 2, 3, 4]
    by_step = dict(step for step in full_run.metrics if "actor/loss" in step[1])
    assert {step: data for step, data in last.metrics if "actor/loss" in data} == by_step
    assert same_weights(last.weights(4), full_run.weights(4))
    assert (last.facts["status"], last.facts["steps"]) == ("finished", 4)
    assert {event["step"] for event in last.events()} == {0, 1, 2, 3, 4}


def test_steps_after_the_checkpoint_run_again_once(full_run: Any, project: Any) -> None:
    """A crash in step 4 leaves rows and events of step 3, half a line, and a checkpoint of step 2."""
    shutil.copytree(full_run.folder, project.root / "run")
    folder = project.root / "run"
    shutil.rmtree(folder / "checkpoints" / "global_step_4")
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2\n", "utf-8")
    (folder / "checkpoints" / ".global_step_4.partial").mkdir()
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
        metrics.write('{"step": 5, "da')
    run = project.run("run", resume=True)
    assert run.metrics == full_run.metrics
    assert same_weights(run.weights(4), full_run.weights(4))
    assert [e["step"] for e in run.events() if e["stage"] == "samples"] == [1, 2, 3, 4]


def test_resuming_a_finished_run_changes_nothing(full_run: Any, project: Any) -> None:
    shutil.copytree(full_run.folder, project.root / "run")
    run = project.run("run", resume=True)
    assert run.metrics == full_run.metrics
    assert run.seen == []
    assert same_weights(run.weights(4), full_run.weights(4))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("none", "no checkpoint to resume from in .*: 4 steps are done, and the first was due after step 2"),
        ("pointer", "names the checkpoint `7`, which is not there or not whole"),
    ],
)
def test_no_checkpoint(project: Any, full_run: Any, damage: str, message: str) -> None:
    folder = project.root / "run"
    shutil.copytree(full_run.folder, folder)
    pointer = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    if damage == "none":
        pointer.unlink()
    else:
        pointer.write_text("7\n", "utf-8")
    with pytest.raises(RunFailure, match=message) as failure:
        project.run("run", resume=True)
    assert failure.value.code == "RLF5010"
    assert len((folder / "metrics.jsonl").read_text("utf-8").splitlines()) == 7  # nothing is lost


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(project: Any, full_run: Any) -> None:
    folder = project.root / "run"
    shutil.copytree(full_run.folder, folder)
    shutil.rmtree(folder / "checkpoints")
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(row for row in lines if json.loads(row)["step"] <= 1), "utf-8")
    run = project.run("run", resume=True)
    assert run.metrics == full_run.metrics
    assert same_weights(run.weights(4), full_run.weights(4))
    assert [e["step"] for e in run.events() if e["stage"] == "samples"] == [1, 2, 3, 4]


def test_half_a_checkpoint(project: Any, full_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(full_run.folder, project.root / "run")
    weights = project.root / "run" / "checkpoints" / "global_step_4" / "actor" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(RunFailure) as failure:
        project.run("run", steps=5, resume=True)
    assert failure.value.code == "RLF5045"
    assert "`actor/model.safetensors` of the checkpoint of step 4 has 1000 bytes" in failure.value.message
    assert failure.value.help[0].startswith("write 2 into ")


def test_other_ways_in(project: Any, capsys: pytest.CaptureFixture[str], new_project: Callable[[], Any]) -> None:
    """A compiled plan, from another working folder, through the Python interface."""
    import rlflow
    from rlflow import driver

    plan = project.root / "plan.json"
    plan.write_text(driver.compile(project.flow).to_json(), "utf-8")
    run = rlflow.run(plan, run_dir=project.root / "run", steps=0)
    assert (run.step, run.facts["steps"], run.checkpoint, run.status) == (0, 0, None, "finished")
