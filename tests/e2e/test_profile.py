"""Measuring an example on this machine, and estimating it from that."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from rlflow import driver
from rlflow.cli import main
from rlflow.profile.read import read_profile

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_arithmetic.rlflow"
STEPS = 10


def command(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    return int(ended.value.code or 0)


def test_a_profile_predicts_the_step_it_was_measured_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "profile.json", tmp_path / "run"
    assert command("profile", EXAMPLE, "--steps", str(STEPS), "-o", file, "--run-dir", folder, "--plain") == 0
    assert "from the stages alone" in capsys.readouterr().out

    profile = read_profile(file)
    assert (profile.flow, profile.cluster, profile.steps) == ("grpo_arithmetic", "local", STEPS)
    stages = {entry.stage: entry for entry in profile.stages}
    assert stages.keys() == {
        "batch", "samples", "ref", "score", "adv", "actor.train", "all.tests", "all.answers", "all.correct",
    }  # fmt: skip
    assert all(entry.low_us <= entry.us <= entry.high_us for entry in profile.stages)
    assert (stages["samples"].rows, stages["batch"].rows, stages["samples"].max_new) == (512, 32, 3)
    assert 512 * (4 + 1) <= (stages["samples"].tokens or 0) <= 512 * (4 + 3)
    assert stages["samples"].prompt_tokens == 4.0
    assert stages["score"].call_us > 0

    rows = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    seconds = [row["timing_s/step"] for row in rows if "timing_s/step" in row][profile.warm_up :]
    plan = driver.compile(EXAMPLE, driver.Options(profile=file))
    assert plan.cadence is not None
    assert mean(seconds) / 2 < plan.cadence.us / 1e6 < mean(seconds) * 2
    assert plan.profile is not None

    assert command("simulate", EXAMPLE, "--profile", file, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(plan.cadence.us / 1e6, rel=0.01)
