"""What goes wrong in a run ends it with exit code 1 and a message that names the stage and the cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

Fails = Callable[..., str]


@pytest.fixture
def fails(project: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Run the project's flow; what stands on stderr after `error[code]`."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")

    def run(code: str, *arguments: str | Path, exit_code: int = 1) -> str:
        given = arguments or (project.flow, "--run-dir", project.root / "run", "--restarts", "0")
        assert project.cli("run", *given) == exit_code
        text = capsys.readouterr().err
        assert "Traceback" not in text
        if not code:
            return text
        assert text.count("error[") == 1
        assert f"error[{code}]" in text, text
        return text.partition(f"error[{code}]: ")[2]

    return run


# --- data ------------------------------------------------------------------------------------------------------------


def test_malformed_row(project: Any, fails: Fails) -> None:
    data = project.root / "data.jsonl"
    lines = data.read_text("utf-8").splitlines()
    data.write_text("\n".join([*lines[:2], '{"question": "1+1=", "answer": ', *lines[3:]]) + "\n", "utf-8")
    text = fails("RLF5002")
    assert "data.jsonl:3" in text
    assert json.loads((project.root / "run" / "run.json").read_text("utf-8"))["status"] == "failed"


def test_missing_column(project: Any, fails: Fails) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"quest": ["1+1="], "answer": ["2"]}), project.root / "data.parquet")
    project.edit('jsonl("data.jsonl"', 'parquet("data.parquet"')
    text = fails("RLF1008")
    assert "no column `question`" in text
    assert "its columns are `quest`, `answer`" in text
    assert "did you mean `quest`?" in text


def test_prompt_too_long(project: Any, fails: Fails) -> None:
    project.edit("hidden = 32", "hidden = 32, context = 6 tokens")
    text = fails("RLF5007")
    assert "has 4 tokens, but only 3 tokens of the model's context are left" in text


# --- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "body", "words"),
    [
        ("RLF5003", "    raise KeyError('boom')", ("raised KeyError on sample", "prompt: ", "response: ", "'boom'")),
        ("RLF5005", "    return 'good'", ("str", "prompt: ", "response: ")),
        ("RLF5005", "    return float('nan')", ("nan", "prompt: ", "response: ")),
    ],
    ids=["raises", "wrong type", "nan"],
)
def test_reward(project: Any, fails: Fails, code: str, body: str, words: tuple[str, ...]) -> None:
    """Never a zero reward in its place. The message shows the sample, and where the flow calls the reward."""
    project.rewards(f"def score(response, answer):\n{body}\n")
    project.edit("  evaluate held every 2 steps {", "  evaluate held every 200 steps {")
    text = fails(code)
    assert text.startswith("stage `held.right`: ")
    assert f"--> {project.flow}:20:" in text
    assert all(word in text for word in words), text
    assert (project.root / "run" / "metrics.jsonl").read_text("utf-8") == ""


def test_reward_that_hangs(project: Any, fails: Fails) -> None:
    project.rewards("import time\n\n\ndef score(response):\n    time.sleep(3600)\n")
    project.edit("timeout = 5 s", "timeout = 500 ms")
    text = fails("RLF5004")
    assert "did not return within 0.5 s on sample 0" in text


def test_reward_module_that_does_not_load(project: Any, fails: Fails) -> None:
    project.rewards("import no_such_module\n\n\ndef score(response):\n    return 0.0\n")
    text = fails("RLF5014")
    assert "no_such_module" in text.splitlines()[-2]
    assert "main-0.log" in text.splitlines()[-1]


# --- models ----------------------------------------------------------------------------------------------------------


def test_model_without_weights(project: Any, fails: Fails, full_run: Any) -> None:
    folder = project.root / "model"
    folder.mkdir()
    for path in (full_run.checkpoint(4) / "actor").iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    project.edit('tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1, intermediate = 64)', 'hf("model")')
    assert "has no weights" in fails("RLF5001")


def test_loss_that_is_not_finite(project: Any, fails: Fails) -> None:
    project.edit("lr = 2e-3", "lr = 1e30")  # the first update makes weights whose products overflow
    text = fails("RLF5009")
    assert text.startswith("stage `actor.train`: ")
    assert f"--> {project.flow}:14:" in text


# --- folders and plans, found before Ray starts ----------------------------------------------------------------------


def test_folder_in_use(project: Any, fails: Fails, capsys: pytest.CaptureFixture[str]) -> None:
    (project.root / "run").mkdir()
    (project.root / "run" / "notes.txt").touch()
    text = fails("", exit_code=2)
    assert "is not empty; choose another folder, or go on with `--resume" in text
    assert project.cli("run", "--resume", project.root / "run") == 2
    assert "is not a run folder: it has no plan.json" in capsys.readouterr().err


def test_plan_of_other_sources(project: Any, fails: Fails, capsys: pytest.CaptureFixture[str]) -> None:
    plan = project.root / "plan.json"
    assert project.cli("compile", project.flow, "-o", plan) == 0
    project.flow.write_text(project.flow.read_text("utf-8") + "# a remark\n", "utf-8")
    text = fails("RLF4002", plan, "--run-dir", project.root / "run")
    assert "sums.rlflow` changed since" in text
    allowed = ("run", plan, "--run-dir", project.root / "run", "--steps", "0", "--allow-changed")
    assert project.cli(*allowed) == 0, capsys.readouterr().err


def test_plan_from_elsewhere(project: Any, fails: Fails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.root)
    plan = tmp_path / "elsewhere.json"
    assert project.cli("compile", "sums.rlflow", "-o", plan) == 0
    text = plan.read_text("utf-8").replace("sums.rlflow", "gone/sums.rlflow")
    plan.write_text(text, "utf-8")
    assert "is not found from here" in fails("RLF4002", plan, "--run-dir", tmp_path / "run")


# --- the machine -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can only be made by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def test_full_disk(project: Any, fails: Fails, small_disk: Path) -> None:
    text = fails("RLF5010", project.flow, "--run-dir", small_disk / "run", "--steps", "1")
    assert "the checkpoint of step 1 cannot be written" in text
    left = sorted(path.name for path in (small_disk / "run" / "checkpoints").iterdir())
    assert left == []


def test_a_rank_that_is_killed(project: Any, fails: Fails) -> None:
    """It is named, the other rank does not wait for it, and what was done is kept."""
    project.flow.write_text(project.flow.read_text("utf-8") + "schedule sums { pool pair = 2 devices }\n", "utf-8")
    project.edit("stop after 4 steps", "stop after 4000 steps")
    killed_at: list[float] = []

    def kill() -> None:
        metrics = project.root / "run" / "metrics.jsonl"
        saved = project.root / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
        while not (saved.is_file() and metrics.is_file() and metrics.read_text("utf-8").count("\n") > 3):
            time.sleep(0.05)
        log = project.root / "run" / "logs" / "pair-1.log"
        killed_at.append(time.monotonic())
        for link in Path("/proc").glob("[0-9]*/fd/1"):
            try:
                if link.readlink() == log:
                    os.kill(int(link.parts[2]), signal.SIGKILL)
            except OSError:
                continue

    threading.Thread(target=kill, daemon=True).start()
    text = fails("RLF5011")
    assert time.monotonic() - killed_at[0] < 30
    assert text.startswith("rank 1 of pool `pair` died")
    assert f"--resume {project.root / 'run'}" in text
    for name in ("trace.json", "learning_curve.svg"):
        assert (project.root / "run" / name).is_file()
