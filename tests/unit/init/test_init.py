"""`rlflow init`: the project it writes is complete, formatted, sound and runs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlflow import driver
from rlflow.commands.fmt import fmt
from rlflow.commands.init import init, project

NAMES = [".gitignore", "README.md", "data/arithmetic.jsonl", "grpo.rlflow", "rewards.py"]


def written(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "my project"
    result = CliRunner().invoke(init, [str(made)])
    assert result.exit_code == 0, result.output
    assert shlex.split(result.output.partition("next:\n")[2].splitlines()[0]) == ["cd", str(made)]
    return made


def test_writes_the_project(folder: Path) -> None:
    assert written(folder) == NAMES
    rows = [json.loads(line) for line in (folder / "data/arithmetic.jsonl").read_text().splitlines()]
    assert len(rows) == 100
    assert all(eval(row["question"].removesuffix("=")) == int(row["answer"]) for row in rows)


def test_check_is_clean(folder: Path) -> None:
    assert driver.check(folder / "grpo.rlflow").warnings == ()


def test_is_formatted(folder: Path) -> None:
    result = CliRunner().invoke(fmt, ["--check", str(folder)])
    assert result.exit_code == 0, result.output


def test_readme_names_the_files(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert all(f"`{name}`" in text for name in NAMES if name not in (".gitignore", "README.md"))


def test_commands_that_are_printed_work(folder: Path) -> None:
    result = CliRunner().invoke(init, [str(folder.parent / "other")])
    commands = [line.strip() for line in result.output.partition("next:\n")[2].splitlines()]
    assert commands[1:] == ["rlflow check grpo.rlflow", "rlflow run grpo.rlflow --steps 2"]
    check = [sys.executable, "-m", *shlex.split(commands[1])]
    done = subprocess.run(check, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    result = CliRunner().invoke(init, [])
    assert result.exit_code == 0
    assert "  cd " not in result.output
    assert written(tmp_path) == sorted([*NAMES, "notes.txt"])


@pytest.mark.parametrize("name", NAMES)
def test_overwrites_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    result = CliRunner().invoke(init, [str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path.as_posix()}/{name}`" in result.output
    assert written(tmp_path) == [name], "refused means: nothing at all is written"
    assert (tmp_path / name).read_text() == "mine"


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    assert CliRunner().invoke(init, [str(tmp_path / "x")]).exit_code == 2


def test_reward_of_the_project() -> None:
    names: dict[str, object] = {}
    exec(compile(project()["rewards.py"], "rewards.py", "exec"), names)
    reward = names["correct_digits"]
    assert callable(reward)
    assert reward(" 12 ", "12") == {"score": 1.0, "exact": True}
    assert reward("13", "12") == {"score": 0.5, "exact": False}
    assert reward("1234", "12") == {"score": 0.5, "exact": False}
    assert reward("", "12") == {"score": 0.0, "exact": False}


@pytest.mark.ray
def test_runs_two_steps(folder: Path) -> None:
    """In an interpreter of its own, as a user would; Ray's session of the other tests is left alone."""
    done = subprocess.run(
        [sys.executable, "-m", "rlflow", "run", "grpo.rlflow", "--steps", "2"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 steps; run folder: runs/grpo/" in done.stdout
    assert "step 2/2" in done.stderr
