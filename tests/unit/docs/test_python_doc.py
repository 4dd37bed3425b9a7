"""docs/python.md: its snippets run, in order, in a folder with the examples."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "python.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python(?P<info>[^\n]*)\n(?P<body>.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", folder, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    if not (folder / "data" / "arithmetic.jsonl").is_file():
        (folder / "data").mkdir(exist_ok=True)
        lines = [f'{{"question": "{a}+{b}=", "answer": "{a + b}"}}' for a in range(10) for b in range(10)]
        (folder / "data" / "arithmetic.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    monkeypatch.chdir(folder)
    return folder


def execute(info: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    chosen = [body for found, body in BLOCKS if found.strip() == info]
    assert chosen
    for body in chosen:
        exec(compile(body, "docs/python.md", "exec"), names)
    return names


def test_snippets(examples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = execute("")
    printed = capsys.readouterr().out
    assert "actor learner -> rollout 15.2" in printed
    assert "no sample older than 1 steps" in printed
    assert "RLF" in printed, "the broken file is refused"
    assert {"program", "plan", "schedule", "shown"} <= names.keys()
    assert (examples / "trace.json").is_file()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_snippets_that_run(examples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import rlflow

    names: dict[str, Any] = {"rlflow": rlflow}
    for info, body in BLOCKS:
        if info.strip() == "ray":
            exec(compile(body, "docs/python.md", "exec"), names)
    run = names["run"]
    assert (run.status, run.step) == ("finished", 2)
    assert [step for step, _ in run.series("critic/score/mean")] == [1, 2]
    assert (examples / "run_trace.json").is_file()
    assert "step 2/2" in capsys.readouterr().err
    assert set(run._repr_mimebundle_()) == {"text/plain", "text/html"}
