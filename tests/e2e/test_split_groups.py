"""Three prompts of four samples on two ranks: the second prompt's samples lie on both (T1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def runs(new_project: Callable[[], Any], ray_cluster: Any) -> list[Any]:
    """The same flow on one rank and on two."""
    found = []
    for ranks in (1, 2):
        project = new_project()
        project.edit("take(4 prompts)", "take(3 prompts)")
        project.edit("minibatch = 8 samples", "minibatch = 6 samples")
        project.flow.write_text(
            project.flow.read_text("utf-8") + f"schedule sums {{ pool pair = {ranks} devices }}\n", "utf-8"
        )
        found.append(project.run("run", steps=2))
    return found


def test_metrics_and_samples_are_those_of_one_rank(runs: list[Any]) -> None:
    one, two = runs
    assert [step for step, _ in two.metrics] == [step for step, _ in one.metrics]
    for (_, got), (step, expected) in zip(two.metrics, one.metrics, strict=True):
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6), f"step {step}"
    assert sorted(two.seen) == sorted(one.seen)
    assert any(data["critic/advantages/max"] > 0 for _, data in one.metrics if "critic/advantages/max" in data)


def test_both_ranks_sample_and_hold_the_same_weights(runs: list[Any]) -> None:
    one, two = runs
    ours, theirs = two.weights(2), one.weights(2)
    assert all(bool((ours[name] - theirs[name]).abs().max() < 1e-4) for name in theirs)
    made = [[e["tokens"] for e in two.events("pair", rank) if e["stage"] == "samples"] for rank in (0, 1)]
    assert all(len(own) == 2 and min(own) > 0 for own in made)
