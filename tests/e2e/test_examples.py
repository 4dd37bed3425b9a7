"""Every example is sound, formatted and repeatable, can be shown and drawn, and trains: two steps on this machine."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from rlflow import driver

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.rlflow"))
NEEDS_A_CHECKPOINT = {
    name for name in NAMES if re.search(r"= (hf|preset)\(", (EXAMPLES / f"{name}.rlflow").read_text("utf-8"))
}

SMALL = ("batch.count=8",)
SMALLER = {"ppo": ("actor.train.minibatch=32",)} | dict.fromkeys(("gspo", "cispo"), ("actor.train.minibatch=64",))
"""Several updates per batch stay several."""

ALWAYS = {"response_length/mean", "prompt_length/max", "perf/total_num_tokens", "timing_s/gen", "timing_s/step"}
REWARDED = {"critic/score/mean", "critic/rewards/mean", "timing_s/reward"}
POLICY = {"actor/loss", "actor/entropy", "actor/grad_norm", "actor/lr"}
GRADIENT = POLICY | REWARDED | {"actor/pg_loss", "critic/advantages/mean"}
CLIPPED = GRADIENT | {"actor/pg_clipfrac", "actor/ppo_kl"}
DISTILLED = POLICY | {"actor/distill_kl"}
METRICS: dict[str, set[str]] = {
    "ppo": CLIPPED
    | {"critic/loss", "critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "timing_s/ref"},
    "grpo_arithmetic": CLIPPED | {"actor/kl_loss", "timing_s/ref"},
    "grpo_lora": CLIPPED | {"actor/kl_loss", "timing_s/ref"},
    "dr_grpo": CLIPPED,
    "dapo": CLIPPED,
    "rloo": GRADIENT,
    "reinforce_pp": CLIPPED | {"actor/kl_loss", "timing_s/ref"},
    "remax": GRADIENT,
    "gspo": GRADIENT | {"actor/pg_clipfrac_sequence", "actor/ppo_kl"},
    "cispo": CLIPPED,
    "online_dpo": POLICY | REWARDED | {"actor/dpo_loss", "actor/dpo_accuracy", "actor/dpo_margin", "timing_s/ref"},
    "rejection_sampling": POLICY | REWARDED | {"actor/nll_loss"},
    "distill": DISTILLED,
    "distill_two_teachers": DISTILLED,
    "tool_use": CLIPPED,
    "async_grpo": CLIPPED | {"actor/kl_loss", "timing_s/ref"},
}

LOCAL = {"async_grpo": "local"}
"""Run colocated on this machine, since the file's own schedule needs more than it has."""

TRAINED = {"ppo": {"actor", "critic"}, "distill": {"student"}, "distill_two_teachers": {"student"}}
"""The models that train, where it is not the actor alone."""

COMPILE_ALL = """\
import hashlib, sys
from rlflow import driver
for name in sys.argv[1:]:
    print(name, hashlib.sha256(driver.compile(f"examples/{name}.rlflow").to_json().encode()).hexdigest())
"""


def path_of(name: str) -> Path:
    return EXAMPLES / f"{name}.rlflow"


def cli(*arguments: str | Path) -> int:
    from rlflow.cli import main

    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    return int(end.value.code or 0)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


# --- without running -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_it_is_sound_without_a_warning(name: str) -> None:
    assert driver.check(path_of(name)).warnings == ()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_formatted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("fmt", "--check", path_of(name)) == 0, capsys.readouterr()


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    digests = [
        subprocess.run(
            [sys.executable, "-c", COMPILE_ALL, *NAMES],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_shown_and_drawn(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert cli("compile", path_of(name), "-o", plan) == 0
    stages = [stage.id for stage in driver.load_plan(plan).stages]
    for source in (plan, path_of(name)):
        capsys.readouterr()
        assert cli("show", source) == 0
        shown = capsys.readouterr().out
        assert all(stage in shown for stage in stages)
    for ending, start in (("dot", "digraph"), ("mmd", "flowchart")):
        assert cli("graph", plan, "--format", ending) == 0
        drawn = capsys.readouterr().out
        assert start in drawn
        assert all(stage in drawn for stage in stages)
    assert cli("graph", plan, "-o", tmp_path / "graph.svg") == 0
    assert ElementTree.fromstring((tmp_path / "graph.svg").read_text("utf-8")).tag.endswith("svg")


@pytest.mark.parametrize("name", NAMES)
def test_only_what_a_stage_trains_is_trainable(name: str) -> None:
    """A checkpoint holds the trainable models, each with an optimizer: a teacher must not be among them."""
    plan = driver.compile(path_of(name))
    assert {model.name for model in plan.models if model.trainable} == TRAINED.get(name, {"actor"})


def test_every_example_has_its_metrics_written_down() -> None:
    assert set(NAMES) - NEEDS_A_CHECKPOINT <= METRICS.keys()


# --- two steps -------------------------------------------------------------------------------------------------------


def run(name: str, folder: Path, steps: int = 2) -> list[dict[str, Any]]:
    """Train in this process, on the Ray it is connected to; the rows of metrics.jsonl."""
    from rich.console import Console

    from rlflow import runs
    from rlflow.backends.visualizers.progress import Progress

    plan = driver.compile(
        path_of(name), driver.Options(cluster=LOCAL.get(name), overrides=SMALL + SMALLER.get(name, ()))
    )
    runs.open_run_dir(folder, resume=False)
    end = runs.execute(runs.RunRequest(plan, EXAMPLES, folder, steps), Progress(None, Console(stderr=True, quiet=True)))
    assert (end.step, end.interrupted) == (steps, False)
    return rows(folder)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS_A_CHECKPOINT])
def test_it_trains(name: str, tmp_path: Path) -> None:
    found = run(name, tmp_path / "run")
    trained = [row["data"] for row in found if "training/global_step" in row["data"]]
    assert [data["training/global_step"] for data in trained] == [1, 2]
    for data in trained:
        missing = (ALWAYS | METRICS[name]) - data.keys()
        assert not missing, f"missing {sorted(missing)}, there are {sorted(data)}"
    for row in found:
        assert {key: value for key, value in row["data"].items() if not math.isfinite(value)} == {}
    assert any(data["actor/grad_norm"] > 0 for data in trained)
    written = tmp_path / "run" / "checkpoints" / "global_step_2"
    assert {entry.name.removesuffix(".training") for entry in written.iterdir() if entry.is_dir()} - {"ahead"} == (
        TRAINED.get(name, {"actor"})
    )
