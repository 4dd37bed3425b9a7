"""A run with adapters on Ray: checkpoints between hold the adapters alone, the last one the merged weights too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlflow import driver

EXAMPLES = Path(__file__).parents[2] / "examples"
OVERRIDES = ("batch.count=8", "actor.hidden=32", "actor.layers=1", "actor.lora.rank=4", "save.every=1")


def run(folder: Path, steps: int, *, resume: bool = False) -> list[dict[str, Any]]:
    from rich.console import Console

    from rlflow import runs
    from rlflow.backends.visualizers.progress import Progress

    plan = driver.compile(EXAMPLES / "grpo_lora.rlflow", driver.Options(overrides=OVERRIDES))
    runs.open_run_dir(folder, resume=resume)
    request = runs.RunRequest(plan, EXAMPLES, folder, steps, resume=resume)
    end = runs.execute(request, Progress(None, Console(stderr=True, quiet=True)))
    assert (end.step, end.interrupted) == (steps, False)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row["data"] for row in rows if "training/global_step" in row["data"]]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_resumed_run_ends_where_a_straight_one_does(tmp_path: Path) -> None:
    straight = run(tmp_path / "a", 3)
    run(tmp_path / "b", 2)
    resumed = run(tmp_path / "b", 3, resume=True)
    for key in ("actor/loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean"):
        assert resumed[-1][key] == straight[-1][key]
    assert straight[0]["actor/kl_loss"] == 0.0 < straight[2]["actor/kl_loss"]
    between, last = (tmp_path / "a" / "checkpoints" / f"global_step_{step}" / "actor" for step in (1, 3))
    for folder in (between, last):
        assert (folder / "adapter" / "adapter_model.safetensors").is_file()
        assert not (folder / "adapter_config.json").exists()
    assert not (between / "config.json").exists()
    assert (last / "config.json").is_file()
    same = [
        (tmp_path / name / "checkpoints" / "global_step_3" / "actor" / file).read_bytes()
        for file in ("model.safetensors", "adapter/adapter_model.safetensors")
        for name in ("a", "b")
    ]
    assert same[0] == same[1]
    assert same[2] == same[3]
