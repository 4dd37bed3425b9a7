"""What `rlflow diff` says of two plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlflow import driver
from rlflow.cli import cli
from rlflow.plan_diff import plan_changes

TEXT = """
flow f {
  data d = reasoning_gym("chain_sum", size = 64)
  model m = preset("qwen3_8b")
  reward e = scorer(d)
  step {
    b = d.take(64 prompts)
    s = m.generate(b, n = 4, max_new = 64 tokens)
    m.train(s, advantages = group_normalize(e(s)), loss = ppo_clip(), optimizer = adamw(1e-3))
  }
  allow m staleness <= 2 steps with truncated_is(2.0)
}
schedule f on pod {
  pool gen = 16 devices
  pool fit = 16 devices
  place m.generate on gen with tp = 2
  place m.train on fit with tp = 4
  staleness m = 1 step
}
cluster pod { host = 8 * ascend_910b hosts = 4 * host }
"""


@pytest.fixture
def write(tmp_path: Path) -> object:
    def made(name: str, *edits: tuple[str, str]) -> Path:
        text = TEXT
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / name
        path.write_text(text)
        return path

    return made


def paths(*files: Path) -> dict[str, tuple[object, object]]:
    a, b = (driver.compile(file) for file in files)
    return {c.path: (c.before, c.after) for c in plan_changes(a, b) if c.section != "sources"}


def test_a_plan_does_not_differ_from_itself(write: object) -> None:
    plan = driver.compile(write("a.rlflow"))  # type: ignore[operator]
    assert plan_changes(plan, plan) == []


def test_moving_text_changes_no_decision(write: object) -> None:
    a, b = write("a.rlflow"), write("b.rlflow", ("flow f {", "# a line more\n\nflow f {"))  # type: ignore[operator]
    assert paths(a, b) == {}


def test_a_layout_is_named_by_its_stage(write: object) -> None:
    a, b = write("a.rlflow"), write("b.rlflow", ("with tp = 4", "with tp = 8"))  # type: ignore[operator]
    found = paths(a, b)
    assert found["stages[m.train].layout.tp"] == (4, 8)
    assert found["stages[m.train].layout.dp"] == (4, 2)
    assert not any(path.startswith("stages[s]") for path in found)


def test_what_is_gone_and_what_is_new(write: object) -> None:
    a = write("a.rlflow")  # type: ignore[operator]
    together = [
        ("  pool fit = 16 devices\n", ""),
        ("m.train on fit", "m.train on gen"),
        ("  staleness m = 1 step\n", ""),
    ]
    b = write("b.rlflow", *together)  # type: ignore[operator]
    kinds = {c.path: c.kind for c in plan_changes(driver.compile(a), driver.compile(b))}
    assert kinds["pools[fit]"] == "removed"
    assert kinds["queues[s->fit]"] == "removed"
    assert kinds["programs[fit]"] == "removed"
    assert kinds["stages[m.train].pool"] == "changed"


def test_thousands_of_ranks_are_a_number(write: object) -> None:
    a, b = write("a.rlflow"), write("b.rlflow", ("gen = 16", "gen = 8"))  # type: ignore[operator]
    found = paths(a, b)
    assert found["pools[gen].devices"] == (16, 8)
    assert not any("ranks" in path for path in found)


def test_command_reads_plans_and_sources_and_says_so_in_its_exit_code(write: object, tmp_path: Path) -> None:
    a, b = write("a.rlflow"), write("b.rlflow", ("= 1 step", "= 2 steps"))  # type: ignore[operator]
    plan = tmp_path / "a.json"
    plan.write_text(driver.compile(a).to_json())
    run = CliRunner().invoke(cli, ["diff", str(plan), str(b)])
    assert run.exit_code == 0
    assert "channels\n  ~ [m].max_staleness: 1 -> 2\n" in run.output
    assert CliRunner().invoke(cli, ["diff", str(plan), str(b), "--exit-code"]).exit_code == 1
    same = CliRunner().invoke(cli, ["diff", str(plan), str(a), "--exit-code"])
    assert same.exit_code == 0
    assert "decide the same" in same.output
    as_json = json.loads(CliRunner().invoke(cli, ["diff", str(plan), str(b), "--format", "json"]).output)
    assert {"path": "queues[s->fit].capacity", "kind": "changed", "before": 2, "after": 3} in as_json
