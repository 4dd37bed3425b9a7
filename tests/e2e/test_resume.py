"""A run that goes on from a checkpoint is the uninterrupted one, bit for bit, also where samples are made ahead."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

CLUSTER = "cluster four {\n  host = 4 * cpu { memory = 8 GiB, cpus = 16 }\n}\n"
TWO_POOLS = """
  pool rollout = 1 devices
  pool learner = 1 devices
  place actor.generate on rollout
  place actor.train, reference on learner
  staleness actor = %d step
"""


def stale(project: Any, steps: int, *edits: tuple[str, str]) -> Any:
    """The small project on two pools, its samples `steps` steps old."""
    project.edit(
        "  save every 2 steps", "  allow actor staleness <= 2 steps with truncated_is(2.0)\n  save every 1 steps"
    )
    project.edit("held every 2 steps", "held every 5 steps")
    for old, new in edits:
        project.edit(old, new)
    body = f"\nschedule sums on four {{\n{TWO_POOLS % steps}\n}}\n{CLUSTER}"
    project.flow.write_text(project.flow.read_text("utf-8") + body, "utf-8")
    return project


def losses(run: Any) -> list[tuple[int, dict[str, float]]]:
    return [row for row in run.metrics if "actor/loss" in row[1]]


def same_weights(one: Any, other: Any, step: int) -> bool:
    ours, theirs = one.weights(step), other.weights(step)
    return ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in theirs)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_stale_run_goes_on_as_if_it_had_not_stopped(project: Any, new_project: Callable[[], Any], steps: int) -> None:
    """Stopped after a step that no evaluation follows, twice: the samples ahead are those of older weights. The step
    after the evaluation is the other case: nothing is ahead of its checkpoint."""
    whole = stale(new_project(), steps).run("run", steps=8)
    parts = stale(project, steps)
    parts.run("run", steps=3)
    parts.run("run", steps=5, resume=True)
    last = parts.run("run", steps=8, resume=True)
    assert losses(last) == losses(whole)
    assert same_weights(last, whole, 8)
    assert same_weights(last, whole, 4)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_stale_run_that_is_ended_from_outside(
    project: Any, new_project: Callable[[], Any], command: Callable[..., Any], ray_cluster: Any, how: str
) -> None:
    """kill -9 of the driver leaves half-written parts, Ctrl-C a last checkpoint with its samples ahead."""
    whole = stale(new_project(), 2).run("run", steps=8)
    address = ray_cluster.get_runtime_context().gcs_address
    stale(project, 2, ("stop after 4 steps", "stop after 8 steps"))
    rewards = (project.root / "rewards.py").read_text("utf-8")
    project.rewards(rewards.replace("    with LOG", "    __import__('time').sleep(0.03)\n    with LOG"))
    run = command("run", "sums.rlflow", "--run-dir", "run", "--address", address)
    run.until("step 3/8")
    run.until((project.root / "run/checkpoints/latest_checkpointed_iteration.txt").is_file)
    if how == "killed":
        run.process.kill()
        run.wait()
    else:
        run.signal(signal.SIGINT)
        assert run.wait(90) == 130, run.text
    last = project.run("run", steps=8, resume=True)
    assert losses(last) == losses(whole)
    assert same_weights(last, whole, 8)
