"""Codes that no .rlflow text gives by itself: they are about plans and about what is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rlflow import driver, runs
from rlflow.diagnostics import RunFailure

TEXT = """
flow add {
  data   sums  = reasoning_gym("chain_sum", size = 64)
  model  actor = tiny(qwen3, alphabet = "0123456789+-=. ")
  reward exact = scorer(sums)
  step {
    answers = actor.generate(sums.take(4 prompts), n = 4, max_new = 8 tokens)
    adv     = group_normalize(exact(answers))
    actor.train(answers, advantages = adv, loss = ppo_clip(0.2), optimizer = adamw(lr = 1e-3))
  }
}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("add.rlflow").write_text(TEXT, "utf-8")
    return Path("add.rlflow")


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json", '{"format": "rlflow.plan", "format_version": "99.0"}'])
def test_a_file_that_is_no_plan(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, "utf-8")
    with pytest.raises(RunFailure) as caught:
        driver.load_plan(path)
    assert caught.value.code == "RLF4001"
    assert str(path) in caught.value.message


def test_a_plan_whose_sources_are_gone(file: Path) -> None:
    plan = driver.compile(file)
    assert driver.find_base_dir(plan) == Path.cwd()
    file.unlink()
    with pytest.raises(RunFailure) as caught:
        driver.find_base_dir(plan)
    assert caught.value.code == "RLF4002"


def test_a_plan_whose_source_changed(file: Path) -> None:
    plan = driver.compile(file)
    runs.check_sources(plan, Path(), allow_changed=False)
    file.write_text(TEXT.replace("1e-3", "1e-4"), "utf-8")
    with pytest.raises(RunFailure) as caught:
        runs.check_sources(plan, Path(), allow_changed=False)
    assert caught.value.code == "RLF4002"
    assert "`add.rlflow` changed" in caught.value.message
    runs.check_sources(plan, Path(), allow_changed=True)


def test_a_missing_package_names_what_to_install(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: dict[str, Any] = {"ray": None, "rlflow.backends.ray_runtime.launcher": None}
    for name, module in hidden.items():
        monkeypatch.setitem(sys.modules, name, module)
    request = runs.RunRequest(driver.compile(file), Path(), Path("run"), 1, None)
    with pytest.raises(RunFailure) as caught:
        runs.execute(request, None)  # type: ignore[arg-type]
    assert caught.value.code == "RLF5012"
    assert 'pip install "rlflow-dsl[run]"' in caught.value.help
