"""Two ranks, each with half of every batch, against one rank with all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rlflow.diagnostics import RunFailure

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def two_ranks(new_project: Callable[[], Any], ray_cluster: Any) -> Any:
    project = new_project()
    project.flow.write_text(project.flow.read_text("utf-8") + "schedule sums { pool pair = 2 devices }\n", "utf-8")
    return project.run("run")


def test_metrics_are_those_of_one_rank(two_ranks: Any, full_run: Any) -> None:
    """Not bit for bit: gradients are summed in another order. The samples are the same all the same."""
    assert [step for step, _ in two_ranks.metrics] == [step for step, _ in full_run.metrics]
    for (_, got), (step, expected) in zip(two_ranks.metrics, full_run.metrics, strict=True):
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6), f"step {step}"
    assert sorted(two_ranks.seen) == sorted(full_run.seen)


def test_an_evaluation_that_does_not_divide_counts_every_row_once(two_ranks: Any, full_run: Any) -> None:
    assert len(two_ranks.seen) == 3 * 5 + 4 * 16
    held = [data for _, data in two_ranks.metrics if "val/held/right/mean" in data]
    assert held == [pytest.approx(data) for _, data in full_run.metrics if "val/held/right/mean" in data]


def test_both_ranks_end_with_the_same_weights(two_ranks: Any, full_run: Any) -> None:
    """Every checkpoint compares the ranks' weights; they also are those of one rank, up to rounding."""
    ours, theirs = two_ranks.weights(4), full_run.weights(4)
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] - theirs[name]).abs().max() < 1e-4) for name in ours)


def test_trace_has_a_row_for_each_rank(two_ranks: Any) -> None:
    trace = json.loads((two_ranks.folder / "trace.json").read_text("utf-8"))
    rows = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"]
    assert rows[:2] == ["rank 0", "rank 1"]
    for rank in (0, 1):
        generated = [e["step"] for e in two_ranks.events("pair", rank) if e["stage"] == "samples"]
        assert generated == [1, 2, 3, 4]


def test_one_row_to_evaluate_then_a_failure(project: Any) -> None:
    """Rank 1 has nothing to evaluate; a reward that fails in step 2 ends both ranks, and its error is what is told."""
    project.flow.write_text(project.flow.read_text("utf-8") + "schedule sums { pool pair = 2 devices }\n", "utf-8")
    held = project.root / "held.jsonl"
    held.write_text(held.read_text("utf-8").splitlines()[0] + "\n", "utf-8")
    project.rewards(
        "import os\n\n\ndef score(prompt, response):\n"
        "    with open(__file__ + str(os.getpid()), 'a') as calls:\n        calls.write('.')\n"
        "    # two workers: the one that does not evaluate is rank 1's\n"
        "    if os.path.getsize(__file__ + str(os.getpid())) > 8 + 1:\n        raise ValueError('enough')\n"
        "    return float(len(set(response)))\n"
    )
    with pytest.raises(RunFailure) as failure:
        project.run("run", steps=3)
    assert (failure.value.code, failure.value.stage) == ("RLF5003", "points")
    assert failure.value.notes[-1] == "ValueError: enough"
    rows = [json.loads(line) for line in (project.root / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
