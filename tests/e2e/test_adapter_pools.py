"""Adapters that are trained on one pool, or in one layout, and sampled from on another: only A and B travel, and what
is learned is what one pool learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

CLUSTER = "cluster four {\n  host = 4 * cpu { memory = 8 GiB, cpus = 16 }\n}\n"
STEPS = 6

ALONE = "pool main = 1 devices"
APART = """
    pool rollout = 1 devices
    pool learner = 1 devices
    place actor.generate on rollout
    place actor.train, reference on learner"""
PARTS = """
    pool rollout = 2 devices
    pool learner = 2 devices
    place actor.generate on rollout with tp = 2
    place actor.train, reference on learner with tp = 2"""


def prepared(project: Any, body: str, *edits: tuple[str, str]) -> Any:
    project.edit("layers = 1,", "layers = 2, lora = lora(rank = 4, targets = all_linear),")
    project.edit("lr = 2e-3", "lr = 1e-2")
    for old, new in edits:
        project.edit(old, new)
    text = project.flow.read_text("utf-8")
    project.flow.write_text(f"{text}\nschedule sums on four {{\n{body}\n}}\n{CLUSTER}", "utf-8")
    return project


def adapters(run: Any, step: int) -> dict[str, Any]:
    return load_file(run.checkpoint(step) / "actor" / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def reference(new_project: Callable[[], Any], ray_cluster: Any) -> Any:
    return prepared(new_project(), ALONE).run("run", steps=STEPS)


def test_two_pools_learn_what_one_does_to_the_last_bit_and_so_does_a_resumed_run(project: Any, reference: Any) -> None:
    run = prepared(project, APART).run("run", steps=4)
    assert run.metrics == [row for row in reference.metrics if row[0] <= 4]
    assert run.seen == reference.seen[: len(run.seen)]
    between = run.checkpoint(2) / "actor"
    assert (between / "adapter" / "adapter_model.safetensors").is_file()
    assert not (between / "config.json").exists()
    losses = [row["actor/kl_loss"] for _, row in run.metrics if "actor/kl_loss" in row]
    assert 0.0 < losses[0] < losses[-1], "of several updates, of which the first moves the policy from its reference"
    run = project.run("run", steps=STEPS, resume=True)
    assert (run.checkpoint(STEPS) / "actor" / "config.json").is_file()
    assert not (run.checkpoint(STEPS) / "actor" / "adapter" / "config.json").exists()
    assert run.metrics == reference.metrics
    for mine, theirs in (
        (run.weights(STEPS), reference.weights(STEPS)),
        (adapters(run, STEPS), adapters(reference, STEPS)),
    ):
        assert mine.keys() == theirs.keys()
        assert all(bool((mine[name] == theirs[name]).all()) for name in theirs)


def test_parts_on_both_sides_learn_the_same_up_to_rounding(project: Any, reference: Any) -> None:
    """Two ranks that train with tensor parallelism, and two that sample with it."""
    run = prepared(project, PARTS).run("run", steps=4)
    compared = 0
    for (step, got), (_, expected) in zip(run.metrics, reference.metrics, strict=False):
        shared = {key: value for key, value in expected.items() if not key.startswith("val/")}
        found = {key: value for key, value in got.items() if not key.startswith("val/")}
        assert found == pytest.approx(shared, rel=1e-4, abs=1e-6), f"step {step}"
        compared += 1
    assert compared >= 4
    ours, theirs = adapters(run, 4), adapters(reference, 4)
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
    assert run.weights(4).keys() == reference.weights(STEPS).keys()
