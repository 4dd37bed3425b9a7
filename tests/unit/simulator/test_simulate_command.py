"""`rlflow simulate` from the outside: files, usage, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow.backends.visualizers.trace_rules import validate_trace
from rlflow.cli import main
from rlflow.plan import Plan

MakePlan = Callable[..., Plan]
EXAMPLES = Path(__file__).parents[3] / "examples"
CPU = ["--stage", "samples=2", "--stage", "ref=0.5", "--stage", "actor.train=1.5"]


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *map(str, arguments)])
    return int(ended.value.code or 0)


@pytest.fixture
def plan_file(make_plan: MakePlan, tmp_path: Path) -> Path:
    file = tmp_path / "plan.json"
    file.write_text(make_plan("split", "staleness m = 1 step", "grpo", 64).to_json(), "utf-8")
    return file


def test_a_plan_file_keeps_what_engines_need(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan_file, "--steps", "3", "--seeds", "2", "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seeds"] == 2
    assert found["steps"] == 3
    assert found["tokens_are"] == "drawn"
    assert found["step_s"] > 0
    assert found["ages"]["s"]["worst"] <= found["ages"]["s"]["promised"] == 1


def test_the_trace_has_the_ids_of_the_plan(plan_file: Path, tmp_path: Path) -> None:
    assert run(plan_file, "--steps", "2", "--trace", tmp_path / "t.json") == 0
    trace = json.loads((tmp_path / "t.json").read_text("utf-8"))
    assert validate_trace(trace) == []
    names = {event["args"].get("instruction") for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"run:s", "run:m.train", "reshard:m", "publish:m", "call:e"} <= names


def test_the_same_text_again(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        assert run(plan_file, "--steps", "3", "--seeds", "1") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_lengths_cannot_be_drawn_without_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(EXAMPLES / "grpo_arithmetic.rlflow", *CPU, "--seeds", "3") == 0
    captured = capsys.readouterr()
    assert "no lengths are drawn" in captured.err
    assert "a step every 4 s" in captured.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stage", "samples"], "write NAME=SECONDS"),
        (["--stage", "samples=-1"], "seconds of at least 0"),
        (["--stage", "samples=nan"], "seconds of at least 0"),
        (["--sweep", "group"], "write PATH=A,B,..."),
        (["--sweep", "group=4", "--trace", "t.json"], "leave --sweep out"),
        (["--plot", "p.svg"], "add --sweep"),
        (["--headroom", "0"], "add --seeds"),
        (["--headroom", "-1", "--seeds", "1"], "--headroom"),
        (["--sweep", "group=4", "--plot", "p.png"], "plots are SVG"),
        (["--sweep", "group=4", "--plot", "nowhere/p.svg"], "there is no folder nowhere"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(EXAMPLES / "async_grpo.rlflow", *arguments) == 2
    assert said in capsys.readouterr().err


def test_a_plan_cannot_be_compiled_again(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan_file, "--sweep", "group=4,8") == 2
    assert "this is a plan already" in capsys.readouterr().err


def test_sweeps_are_combined(capsys: pytest.CaptureFixture[str]) -> None:
    file = EXAMPLES / "async_grpo.rlflow"
    assert run(file, "--steps", "2", "--sweep", "group=4,8", "--sweep", "batch.count=16,32", "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["set"] for row in found] == [
        {"group": "4", "batch.count": "16"},
        {"group": "4", "batch.count": "32"},
        {"group": "8", "batch.count": "16"},
        {"group": "8", "batch.count": "32"},
    ]
    assert all(row["step_s"] > 0 for row in found)


def test_a_sweep_in_which_nothing_compiles_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(EXAMPLES / "async_grpo.rlflow", "--sweep", "grup=4,8") == 1
    assert capsys.readouterr().out.count("error[RLF1011]") == 2


def test_a_sweep_is_drawn_with_what_the_table_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["--steps", "2", "--seeds", "2", "--sweep", "batch.count=16,17,32", "--sweep", "group=4,8"]
    assert run(EXAMPLES / "async_grpo.rlflow", *sweep, "--format", "json", "--plot", tmp_path / "p.svg") == 0
    found = json.loads(capsys.readouterr().out)
    svg = (tmp_path / "p.svg").read_text("utf-8")
    assert "lengths drawn with 2 seeds; bars: 95 % confidence" in svg
    rated = [row for row in found if "error" not in row]
    assert len(rated) == 5, "68 samples do not divide over 8 ranks"
    for row in rated:
        low, high = row["tokens_per_s_interval"]
        assert low <= row["tokens_per_s"] <= high
        point = f"batch.count = {row['set']['batch.count']}, group = {row['set']['group']}"
        assert f"<title>{point}: tokens/s {row['tokens_per_s']:.4g} +- {(high - low) / 2:.2g}</title>" in svg
        assert f"<title>{point}: seconds a step {row['step_s']:.4g} +- " in svg
    for row in found:
        if "error" in row:
            assert row["error"].split("`")[0] in svg


def test_pools_can_be_swept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A parameter of the flow in its schedule; a bare number counts what the default counts."""
    text = (EXAMPLES / "async_grpo.rlflow").read_text("utf-8")
    text = text.replace("(group = 16)", "(group = 16, size = 16 devices)").replace(
        "rollout = 16 devices", "rollout = size"
    )
    for name in ("data", "rewards.py"):
        (tmp_path / name).symlink_to(EXAMPLES / name)
    (tmp_path / "sized.rlflow").write_text(text, "utf-8")
    assert run(tmp_path / "sized.rlflow", "--steps", "2", "--sweep", "size=4,8 devices", "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["pools"]["rollout"]["devices"] for row in found] == [4, 8]
    assert found[0]["step_s"] > found[1]["step_s"]
