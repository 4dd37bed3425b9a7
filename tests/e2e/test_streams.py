"""Schedules with a trigger, another rule than `in_order`, or bursts: two pools, samples admitted one group at a time."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

CLUSTER = "cluster four {\n  host = 4 * cpu { memory = 8 GiB, cpus = 16 }\n}\n"
SCHEDULE = """
schedule sums on four {{
  pool rollout = {ranks} devices
  pool learner = 1 devices
  place actor.generate on rollout{layout}
  place actor.train, reference on learner
  {body}
}}
"""
TRIGGER = "staleness actor = 1 step\n  trigger samples at 75%, carry partial"
GROUP = 4


def prepared(project: Any, body: str, ranks: int = 1, tp: int = 1, saves: str = "save every 2 steps") -> Any:
    """Batches of 8 prompts whose responses end at very different lengths."""
    project.edit("max_new = 3 tokens)\n    ref", "max_new = 40 tokens)\n    ref")
    project.edit("take(4 prompts)", "take(8 prompts)")
    project.edit("save every 2 steps", f"allow actor staleness <= 2 steps with truncated_is(2.0)\n  {saves}")
    text = SCHEDULE.format(body=body, ranks=ranks, layout=f" with tp = {tp}" if tp > 1 else "") + CLUSTER
    project.flow.write_text(project.flow.read_text("utf-8") + text, "utf-8")
    return project


def edges(folder: Path, step: int) -> dict[str, Any]:
    found = json.loads((folder / "checkpoints" / f"global_step_{step}" / "state.json").read_text("utf-8"))
    edge: dict[str, Any] = found["edges"]["samples"]
    return edge


def trained_samples(run: Any) -> list[int]:
    """Samples that every step trained on, by the reward's calls that the rank wrote down."""
    return [event["tokens"] for event in run.events("learner") if event["instruction"] == "run:actor.train"]


@pytest.mark.parametrize(
    ("body", "ranks", "tp"),
    [
        (TRIGGER, 2, 1),
        (TRIGGER, 2, 2),
        ("staleness actor = 1 step, admit slack_edf", 1, 1),
        ("staleness actor = 1 step, admit evict", 1, 1),
    ],
    ids=["trigger", "trigger with tensor parallelism", "slack_edf", "evict"],
)
def test_samples_are_admitted_by_the_rule_and_trained_on_once(project: Any, body: str, ranks: int, tp: int) -> None:
    """Ages are checked in every training (RLF5040); evaluations, of the weights of their steps, lie in between."""
    run = prepared(project, body, ranks, tp).run("run", steps=5)
    assert run.trained_steps == [1, 2, 3, 4, 5]
    assert [row["step"] for row in run.rows if any(key.startswith("val/") for key in row["data"])] == [0, 2, 4, 5]
    cursor = edges(run.folder, 5)
    trained = cursor["ends"]["trained"]
    least, most = (6, 8) if body is TRIGGER else (8, 8)
    assert 5 * least <= trained <= 5 * most
    held_out = 4 * 5  # prompts of the evaluations, one sample each
    assert len(run.seen) == trained * GROUP + held_out, "every sample that is trained on is scored once"
    assert cursor["ended"][0][0] == 0, "prompts in the order of the data"
    assert set(cursor["ends"]) <= {"trained", "too old"}


def test_bursts_in_order_are_the_same_every_time(project: Any) -> None:
    """Whole batches in the order of the data, each made by one version, however the replicas' samples end."""
    prepared(project, "staleness actor = 2 steps, burst = 2 steps", 2)
    runs = [project.run(f"run{number}", steps=5) for number in (1, 2)]
    assert runs[0].trained_steps == [1, 2, 3, 4, 5]
    cursor = edges(runs[0].folder, 5)
    assert cursor["ends"] == {"trained": 5 * 8}
    assert cursor["ended"] == [[0, 40]]
    ages = [row["data"]["age/samples/max"] for row in runs[0].rows if "age/samples/max" in row["data"]]
    assert ages == [0, 1, 2, 1, 2], "the first window has three batches, and a burst two"
    assert runs[1].metrics == runs[0].metrics
    final = [(run.checkpoint(5) / "actor" / "model.safetensors").read_bytes() for run in runs]
    assert final[0] == final[1]


def test_a_resumed_run_trains_every_prompt_once(project: Any) -> None:
    """Steps 1 to 2, then a resume to step 6: what was under way at the checkpoint comes again, first."""
    project = prepared(project, TRIGGER)
    first = project.run("run", steps=2)
    before = edges(first.folder, 2)
    run = project.run("run", steps=6, resume=True)
    after = edges(run.folder, 6)
    assert run.trained_steps == [1, 2, 3, 4, 5, 6]
    ended = {place for low, high in after["ended"] for place in range(low, high)}
    assert {place for low, high in before["ended"] for place in range(low, high)} <= ended
    assert len(ended) == after["ends"]["trained"], "one end each"
    assert ended | set(after["again"]) == set(range(after["next"])), "none skipped"


def test_ctrl_c_stops_a_stream_after_a_step(command: Callable[..., Any], project: Any) -> None:
    prepared(project, TRIGGER).edit("stop after 4 steps", "stop after 4000 steps")
    running = command("run", "sums.rlflow", "--run-dir", "run")
    running.until(lambda: (project.root / "run" / "checkpoints" / "global_step_2").is_dir(), 120)
    running.signal(signal.SIGINT)
    assert running.wait(90) == 130, running.text
    steps = sorted(int(path.name.rsplit("_", 1)[1]) for path in (project.root / "run" / "checkpoints").glob("global_*"))
    assert edges(project.root / "run", steps[-1])["ends"]["trained"] >= 6 * steps[-1]
