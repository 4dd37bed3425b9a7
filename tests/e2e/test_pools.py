"""One flow under many schedules: where its stages run, and how its models are cut, does not change what is learned."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

CLUSTER = "cluster four {\n  host = 4 * cpu { memory = 8 GiB, cpus = 16 }\n}\n"
STEPS = 20

PLACES = {
    "all on one": "pool main = 1 devices",
    "reference apart": """
        pool main = 1 devices
        pool other = 1 devices
        place actor.generate, actor.train on main
        place reference on other""",
    "disaggregated": """
        pool rollout = 1 devices
        pool learner = 1 devices
        place actor.generate on rollout
        place actor.train, reference on learner""",
    "every role apart": """
        pool rollout = 1 devices
        pool learner = 1 devices
        pool other = 1 devices
        place actor.generate on rollout
        place actor.train on learner
        place reference on other""",
}
"""Schedules of equal layouts: every model whole on one device."""

LAYOUTS = {
    "two replicas": "pool main = 2 devices",
    "tensor parallel both": "pool main = 2 devices\nplace actor.generate, actor.train, reference on main with tp = 2",
    "tensor parallel rollout": """
        pool main = 2 devices
        place actor.generate on main with tp = 2
        place actor.train, reference on main""",
    "FSDP": """
        pool main = 2 devices
        place actor.generate on main
        place actor.train, reference on main with zero = 3""",
    "pipeline": """
        pool main = 2 devices
        place actor.generate on main
        place actor.train, reference on main with pp = 2""",
    "pipeline to tensor parallel": """
        pool rollout = 2 devices
        pool learner = 2 devices
        place actor.generate on rollout with tp = 2
        place actor.train, reference on learner with pp = 2""",
    "one to three": """
        pool rollout = 1 devices
        pool learner = 3 devices
        place actor.generate on rollout
        place actor.train, reference on learner with dp = 3""",
    "two by two": """
        pool main = 4 devices
        place actor.generate on main
        place actor.train, reference on main with tp = 2""",
}


def schedule(body: str) -> str:
    return f"\nschedule sums on four {{\n{body}\n}}\n{CLUSTER}"


def prepared(project: Any, body: str, *edits: tuple[str, str]) -> Any:
    """The small project with two layers, so that a pipeline has something to divide, and a schedule."""
    project.edit("layers = 1", "layers = 2")
    project.edit("take(4 prompts)", "take(6 prompts)")
    project.edit("minibatch = 8 samples", "minibatch = 12 samples")
    for old, new in edits:
        project.edit(old, new)
    project.flow.write_text(project.flow.read_text("utf-8") + schedule(body), "utf-8")
    return project


@pytest.fixture(scope="module")
def reference(new_project: Callable[[], Any], ray_cluster: Any) -> Any:
    return prepared(new_project(), PLACES["all on one"]).run("run", steps=STEPS)


@pytest.mark.parametrize("name", [name for name in PLACES if name != "all on one"])
def test_equal_layouts_learn_the_same_to_the_last_bit(project: Any, reference: Any, name: str) -> None:
    run = prepared(project, PLACES[name]).run("run", steps=STEPS)
    assert run.metrics == reference.metrics
    assert run.seen == reference.seen
    ours, theirs = run.weights(STEPS), reference.weights(STEPS)
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_other_layouts_learn_the_same_up_to_rounding(project: Any, reference: Any, name: str) -> None:
    run = prepared(project, LAYOUTS[name]).run("run", steps=4)
    for (step, got), (_, expected) in zip(run.metrics, reference.metrics, strict=False):
        shared = {key: value for key, value in expected.items() if not key.startswith("val/")}
        found = {key: value for key, value in got.items() if not key.startswith("val/")}
        assert found == pytest.approx(shared, rel=1e-4, abs=1e-6), f"step {step}"
    assert sorted(run.seen) == sorted(reference.seen[: len(run.seen)]), "the same samples"
    ours, theirs = run.weights(4), reference.weights(4)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].shape == theirs[name].shape for name in theirs)


ASYNC = """
    pool rollout = 1 devices
    pool learner = 1 devices
    place actor.generate on rollout
    place actor.train, reference on learner
    staleness actor = 1 step"""
ALLOW = ("  save every 2 steps", "  allow actor staleness <= 2 steps with truncated_is(2.0)\n  save every 2 steps")


def test_stale_samples_have_the_age_that_the_schedule_says(
    project: Any, new_project: Callable[[], Any], ray_cluster: Any
) -> None:
    runs = [prepared(p, ASYNC, ALLOW).run("run", steps=6) for p in (project, new_project())]
    versions = {e["step"]: e["version"] for e in runs[0].events("rollout") if e["instruction"] == "run:samples"}
    # An evaluation after every second step brings the weights of that step, which the next one may use.
    assert versions == {1: 0, 2: 0, 3: 2, 4: 2, 5: 4, 6: 4}
    assert runs[0].metrics == runs[1].metrics, "asynchronous, and the same again"
    assert runs[0].trained_steps == [*range(1, 7)]
    rows = {row["step"]: row["data"] for row in runs[0].rows if "age/samples/max" in row["data"]}
    assert {step: data["age/samples/max"] for step, data in rows.items()} == {1: 0, 2: 1, 3: 0, 4: 1, 5: 0, 6: 1}
    assert [data[f"age/samples/count/{step % 2 == 0:d}"] for step, data in rows.items()] == [24.0] * 6
    for data in rows.values():
        assert all(0 <= data[f"pool/{pool}/idle"] <= 1 for pool in ("rollout", "learner"))
        assert {"pool/learner/wait_s/take:samples", "pool/rollout/wait_s/put:samples->learner"} <= set(data)
    log = (runs[0].folder / "logs" / "rollout-0.log").read_text("utf-8")
    assert log.count("INFO rollout/0 step 6 rlflow: done in") == 1


def test_a_resumed_run_of_two_pools_is_the_uninterrupted_one(project: Any, reference: Any) -> None:
    prepared(project, PLACES["disaggregated"]).run("run", steps=2)
    resumed = project.run("run", steps=6, resume=True)
    rows = [row for row in reference.metrics if row[0] <= 6]
    got = [row for row in resumed.metrics if row[0] <= 6]
    assert [row for row in got if "actor/loss" in row[1]] == [row for row in rows if "actor/loss" in row[1]]


def test_a_resumed_run_of_models_in_parts_goes_on_under_any_layout(
    project: Any, reference: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps with a pipeline, then two with tensor parallelism: the optimizer's state goes along."""
    prepared(project, LAYOUTS["pipeline to tensor parallel"]).run("run", steps=2)
    project.edit("on learner with pp = 2", "on learner with tp = 2")
    assert project.cli("compile", project.flow, "-o", project.root / "run/plan.json") == 0
    capsys.readouterr()
    resumed = project.run("run", steps=4, resume=True)
    for (step, got), (_, expected) in zip(resumed.metrics, reference.metrics, strict=False):
        if "actor/loss" in expected:
            assert got["actor/loss"] == pytest.approx(expected["actor/loss"], rel=1e-4, abs=1e-6), f"step {step}"
            assert got["critic/score/mean"] == pytest.approx(expected["critic/score/mean"], rel=1e-4)

    weights = project.root / "run/checkpoints/global_step_4/actor/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert project.cli("run", "--resume", project.root / "run", "--steps", "6") == 1
    shown = capsys.readouterr().err
    assert "error[RLF5045]: `actor/model.safetensors` of the checkpoint of step 4 has" in shown
    assert "write 2 into" in shown


def test_ctrl_c_stops_all_pools_after_one_step(command: Callable[..., Any], project: Any) -> None:
    """None waits for another that has ended; the checkpoint is that of the last step."""
    prepared(project, ASYNC, ALLOW, ("stop after 4 steps", "stop after 100000 steps"))
    run = command("run", "sums.rlflow", "--run-dir", "run")
    run.until("step 5")
    run.signal(signal.SIGINT)
    assert run.wait(90) == 130, run.text
    latest = int((project.root / "run/checkpoints/latest_checkpointed_iteration.txt").read_text("utf-8"))
    assert latest >= 5
    assert "--resume" in run.text


def test_experts_on_two_ranks_learn_what_one_rank_learns(project: Any, new_project: Callable[[], Any]) -> None:
    """Each of the training ranks holds half of the experts; the samples come from a whole model."""
    experts = ("tiny(qwen3,", "tiny(qwen3_moe, experts = 4, experts_per_token = 2,")
    one = prepared(new_project(), PLACES["all on one"], experts).run("run", steps=3)
    body = """
        pool main = 2 devices
        place actor.generate on main
        place actor.train, reference on main with ep = 2"""
    two = prepared(project, body, experts).run("run", steps=3)
    assert two.trained_steps == [1, 2, 3]
    got, expected = ([row for _, row in run.metrics if "actor/loss" in row] for run in (two, one))
    for name in ("actor/loss", "actor/grad_norm", "critic/score/mean"):
        values = [row[name] for row in expected]
        assert [row[name] for row in got] == pytest.approx(values, rel=1e-4), name
        assert len(set(values)) == 3, name
    assert sorted(two.seen) == sorted(one.seen)
