"""Imposed lengths in real runs: the same in every plan, measured by a profile, and drawn by the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlflow import driver
from rlflow.cli import main
from rlflow.cost.assumed_lengths import assumed_lengths, lengths_of
from rlflow.profile.read import read_profile
from tests.e2e.test_streams import CLUSTER, GROUP, SCHEDULE, TRIGGER

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

LENGTHS = "lognormal(9, 1)"
MAX_NEW, STEPS = 40, 3


def command(*arguments: str | Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    assert not ended.value.code


def prepared(project: Any) -> list[Path]:
    """Two plans of one flow without evaluations."""
    project.edit("max_new = 3 tokens)\n    ref", f"max_new = {MAX_NEW} tokens)\n    ref")
    project.edit('  data   held_out  = jsonl("held.jsonl", prompt = "question", answer = "answer")\n', "")
    before, _, after = project.flow.read_text("utf-8").partition("  evaluate held")
    allow = "  allow actor staleness <= 2 steps with truncated_is(2.0)\n"
    flow = before + allow + after[after.index("  save every") :]
    paths = []
    for name, body in (("together", ""), ("stream", TRIGGER)):
        paths.append(project.root / f"{name}.rlflow")
        paths[-1].write_text(flow + SCHEDULE.format(ranks=1, body=body, layout="") + CLUSTER, "utf-8")
    return paths


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_plans_get_the_same_lengths_and_a_profile_has_them(project: Any) -> None:
    together, stream = prepared(project)
    file, measured, run = (project.root / name for name in ("profile.json", "measured", "run"))
    how = ("--steps", str(STEPS), "--lengths", LENGTHS, "--plain")
    command("profile", together, "-o", file, "--run-dir", measured, *how)
    stage = read_profile(file).find("samples")
    assert stage is not None
    assert stage.lengths is not None
    assert (stage.lengths.mean, stage.lengths.sigma) == (9, 1)
    assert stage.engine is not None
    assert stage.engine.step_us + stage.engine.sample_us > 0

    # What a simulation of the other plan draws is what this one has had: step by step, in the order of the data.
    plan = driver.compile(stream, driver.Options(profile=file))
    facts = next(estimate.engine for estimate in plan.estimates if estimate.stage == "samples")
    assert facts is not None
    length = lengths_of(assumed_lengths(facts), plan.seed, "samples")
    for step, row in enumerate(metrics(measured)):
        drawn = [length(place, sample) for place in range(4 * step, 4 * step + 4) for sample in range(GROUP)]
        assert row["response_length/max"] == max(drawn)
        assert row["response_length/min"] == min(drawn)
        assert row["response_length/mean"] == pytest.approx(sum(drawn) / len(drawn))

    # In a stream the prompts that were trained on have them, whichever step they came to.
    command("run", stream, "--run-dir", run, *how)
    state = json.loads((run / "checkpoints" / f"global_step_{STEPS}" / "state.json").read_text("utf-8"))
    places = [place for low, high in state["edges"]["samples"]["ended"] for place in range(low, high)]
    tokens = sum(
        row["response_length/mean"] * sum(n for name, n in row.items() if name.startswith("age/samples/count/"))
        for row in metrics(run)
    )
    assert len(places) >= 3 * STEPS
    assert tokens == pytest.approx(sum(length(place, sample) for place in places for sample in range(GROUP)))
    assert json.loads((run / "run.json").read_text("utf-8"))["lengths"] == LENGTHS
    events = [json.loads(line) for line in (run / "trace" / "rollout-0.jsonl").read_text("utf-8").splitlines()]
    assert any(steps for event in events for steps, _, _, _ in event.get("engine", ()))
