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
LAYOUTS = {
    "two replicas, sampled in parts": """
        pool main = 2 devices
        place actor.generate on main with tp = 2
        place actor.train, reference on main""",
    "one rank to two that sample in parts": """
        pool rollout = 2 devices
        pool learner = 1 devices
        place actor.generate on rollout with tp = 2
        place actor.train, reference on learner""",
}
"""Schedules that differ from one rank by rounding."""


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


def test_equal_layouts_learn_the_same_to_the_last_bit(project: Any, reference: Any) -> None:
    run = prepared(project, APART).run("run", steps=STEPS)
    assert run.metrics == reference.metrics
    assert run.seen == reference.seen
    for mine, theirs in ((run.weights(STEPS), reference.weights(STEPS)), (adapters(run, 4), adapters(reference, 4))):
        assert mine.keys() == theirs.keys()
        assert all(bool((mine[name] == theirs[name]).all()) for name in theirs)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_other_layouts_learn_the_same_up_to_rounding(project: Any, reference: Any, name: str) -> None:
    run = prepared(project, LAYOUTS[name]).run("run", steps=4)
    for (step, got), (_, expected) in zip(run.metrics, reference.metrics, strict=False):
        shared = {key: value for key, value in expected.items() if not key.startswith("val/")}
        found = {key: value for key, value in got.items() if not key.startswith("val/")}
        assert found == pytest.approx(shared, rel=1e-4, abs=1e-6), f"step {step}"
    assert sorted(run.seen) == sorted(reference.seen[: len(run.seen)]), "the same samples"
    ours, theirs = adapters(run, 4), adapters(reference, 4)
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
