"""A run that fits only with swap, on two ranks, against the run with room for everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

SCHEDULE = """\
schedule sums {{
  pool main = 2 devices {{ memory = {memory} }}
  place actor.generate on main with tp = 2
  place actor.train, reference on main with dp = 2
}}
"""
MOVES = {
    "offload:actor optimizer",
    "onload:actor optimizer",
    "drop:actor rollout weights",
    "onload:reference weights",
    "drop:reference weights",
}


@pytest.fixture(scope="module")
def projects(new_project: Callable[[], Any]) -> tuple[Any, Any]:
    made = []
    for memory in ("100 MiB", "6.1 MiB"):
        project = new_project()
        project.edit("hidden = 32, layers = 1, intermediate = 64", "hidden = 64, layers = 2, intermediate = 128")
        text = project.flow.read_text("utf-8") + SCHEDULE.format(memory=memory)
        project.flow.write_text(text, "utf-8")
        made.append(project)
    return made[0], made[1]


def test_a_run_with_swap_learns_the_same_in_less_memory(projects: tuple[Any, Any]) -> None:
    roomy = projects[0].run("roomy")
    tight = projects[1].run("tight")

    def learned(metrics: list[tuple[int, dict[str, float]]]) -> list[tuple[int, dict[str, float]]]:
        return [(step, {k: v for k, v in data.items() if not k.startswith("memory/")}) for step, data in metrics]

    assert {e["instruction"] for e in tight.events() if e["kind"] in ("offload", "onload", "drop")} >= MOVES
    steps = {(step, "actor/loss" in data): data for step, data in learned(tight.metrics)}
    wanted = {(step, "actor/loss" in data): data for step, data in learned(roomy.metrics)}
    assert steps == wanted
    theirs = roomy.weights(4)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tight.weights(4).items())

    for rank in (0, 1):
        resident = [event for event in tight.events(rank=rank) if "device_bytes" in event]
        assert len({event["instruction"] for event in resident}) > len(MOVES)
        assert all(event["device_bytes"] <= event["planned_bytes"] for event in resident)
    peaks = [
        max(data["memory/main/device_peak_bytes"] for _, data in run.metrics if "actor/loss" in data)
        for run in (roomy, tight)
    ]
    assert peaks[1] < peaks[0]


def test_without_swap_the_same_schedule_is_refused(projects: tuple[Any, Any], capsys: Any) -> None:
    project = projects[1]
    project.edit("memory = 6.1 MiB", "memory = 6.1 MiB\n    swap = false")
    assert project.cli("compile", project.flow, "-o", project.root / "plan.json") == 1
    assert "RLF2004" in capsys.readouterr().err
