"""The checker of traces sees every breach of the format, and what is written breaks none: arrows, two sides, real plans."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlflow import driver, tracing
from rlflow.backends.visualizers.trace import build_overlay, build_trace
from rlflow.backends.visualizers.trace_rules import LARGEST_ID, validate_trace
from rlflow.cli import main
from rlflow.plan import Plan

ROOT = Path(__file__).parents[3]
PANGU = ROOT / "examples" / "pangu_ultra_moe.rlflow"

Trace = dict[str, Any]


def good() -> Trace:
    """Every phase once or more: metadata, X, B and E, a counter, an instant, a flow."""
    names = [
        {"ph": "M", "name": f"{what}_{word}", "pid": 1, "tid": tid, "args": {word: value}}
        for what, tid in (("process", 0), ("thread", 0), ("thread", 1))
        for word, value in (("name", f"{what} {tid}"), ("sort_index", tid))
    ]
    bar = {"ph": "X", "name": "run", "cat": "run", "pid": 1, "tid": 0, "ts": 0, "dur": 10}
    flow = {"name": "rows", "cat": "rows", "id": 7, "pid": 1}
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            *names,
            bar,
            {"ph": "C", "name": "rate", "pid": 1, "tid": 0, "ts": 1, "args": {"tokens/s": 3}},
            {"ph": "s", **flow, "tid": 0, "ts": 9},
            {"ph": "B", "name": "step", "pid": 1, "tid": 1, "ts": 10},
            {"ph": "f", "bp": "e", **flow, "tid": 1, "ts": 10},
            {"ph": "i", "name": "checkpoint", "pid": 1, "tid": 1, "ts": 12},
            {"ph": "E", "name": "step", "pid": 1, "tid": 1, "ts": 20},
        ],
    }


def of(trace: Trace, phase: str) -> dict[str, Any]:
    return next(event for event in trace["traceEvents"] if event["ph"] == phase)


BREACHES: list[tuple[Callable[[Trace], Any], str]] = [
    (lambda t: of(t, "X").pop("dur"), "X needs dur"),
    (lambda t: of(t, "X").update(dur=-1), "X needs dur"),
    (lambda t: of(t, "X").update(dur=1.5), "X needs dur"),
    (lambda t: of(t, "X").pop("ts"), "ts must be whole microseconds"),
    (lambda t: of(t, "X").update(ts=-1), "ts must be whole microseconds"),
    (lambda t: of(t, "X").update(ts=2**53), "ts must be whole microseconds"),
    (lambda t: of(t, "X").pop("name"), "no name"),
    (lambda t: of(t, "X").update(pid=LARGEST_ID + 1), "integers from 0 to 2147483647"),
    (lambda t: of(t, "X").update(tid="0"), "integers from 0 to 2147483647"),
    (lambda t: of(t, "X").update(ph="Z"), "phase 'Z'"),
    (lambda t: of(t, "X").update(ts=5), "ts goes back from 5 to 1"),
    (lambda t: of(t, "C").update(args={}), "counter's args"),
    (lambda t: of(t, "C").update(args={"a": "1"}), "counter's args"),
    (lambda t: of(t, "C").pop("args"), "counter's args"),
    (lambda t: of(t, "s").pop("id"), "needs an id"),
    (lambda t: of(t, "s").pop("cat"), "needs a cat"),
    (lambda t: of(t, "s").update(id=8), "0 starts and 1 ends"),
    (lambda t: t["traceEvents"].remove(of(t, "f")), "1 starts and 0 ends"),
    (lambda t: of(t, "f").update(ts=30), "no bar at 30 us on pid 1 tid 1"),
    (lambda t: of(t, "X").update(ts=0, dur=3), "no bar at 9 us on pid 1 tid 0"),
    (lambda t: (of(t, "s").update(tid=1, ts=15), of(t, "f").update(ts=14)), "before its start"),
    (lambda t: t["traceEvents"].remove(of(t, "B")), "E without B"),
    (lambda t: t["traceEvents"].remove(of(t, "E")), "B of `step` at 10 us has no E"),
    (lambda t: of(t, "E").update(name="other"), "E of `other` ends the B of `step`"),
    (lambda t: of(t, "M").update(args={}), "process_name without args.name"),
    (lambda t: t["traceEvents"].remove(of(t, "M")), "no metadata event process_name"),
]


def test_a_good_trace_has_no_breach() -> None:
    assert validate_trace(good()) == []


@pytest.mark.parametrize(("breach", "finding"), BREACHES)
def test_each_breach_is_found(breach: Callable[[Trace], Any], finding: str) -> None:
    trace = good()
    breach(trace)
    assert any(finding in problem for problem in validate_trace(trace)), validate_trace(trace)


# --- what rlflow writes ------------------------------------------------------------------------------------------------


@cache
def pangu() -> Plan:
    return driver.compile(PANGU)


def slower(events: tuple[tracing.Event, ...], factor: float, later: int) -> list[dict[str, Any]]:
    """A run that did the same, slower and after some start-up, on two ranks of every pool."""
    return [
        {**e, "start_us": e["start_us"] * factor + later, "duration_us": e["duration_us"] * factor, "rank": rank}
        for e in events
        for rank in (0, 1)
    ]


def processes(trace: Trace) -> list[str]:
    return [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]


def test_rows_and_weights_are_followed() -> None:
    trace = build_trace(tracing.planned_events(pangu(), 5), pangu())
    assert validate_trace(trace) == []
    assert processes(trace) == ["pool rollout", "pool learner", "pool cpu"]
    starts = [e for e in trace["traceEvents"] if e["ph"] == "s"]
    assert Counter(e["name"] for e in starts) == {"rows samples": 10, "rows correct": 5, "weights actor": 3}
    pids = {name: pid for pid, name in enumerate(processes(trace), start=1)}
    ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    crossings = {(e["pid"], ends[e["id"]]["pid"]) for e in starts if e["name"] == "weights actor"}
    assert crossings == {(pids["pool learner"], pids["pool rollout"])}


def test_planned_and_measured_are_two_processes() -> None:
    planned = tracing.planned_events(pangu(), 4)
    trace = build_overlay(planned, slower(planned, 1.25, 7_000_000), pangu())
    assert validate_trace(trace) == []
    assert processes(trace) == ["planned", "measured"]
    rows = [(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert rows == [
        (1, "rollout rank 0"), (1, "learner rank 0"), (1, "cpu worker 0"),
        (2, "rollout rank 0"), (2, "rollout rank 1"), (2, "learner rank 0"), (2, "learner rank 1"),
        (2, "cpu worker 0"), (2, "cpu worker 1"),
    ]  # fmt: skip
    first = {
        pid: min(e["ts"] for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid and e["name"] == "step 1")
        for pid in (1, 2)
    }
    assert first[1] == first[2] == 7_000_000, "the first step starts at one time on both sides"
    arrows = Counter(e["pid"] for e in trace["traceEvents"] if e["ph"] == "s")
    assert arrows[1] == arrows[2] > 0, "arrows are of one rank of a pool"


def test_one_side_alone() -> None:
    planned = tracing.planned_events(pangu(), 2)
    assert processes(build_overlay(planned, [], pangu())) == ["planned"]
    assert processes(build_overlay([], [], pangu())) == []


# --- the command -------------------------------------------------------------------------------------------------------


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(argv))
    code = caught.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with the events of two ranks, as the runtime writes them: since the epoch, a file a rank."""
    folder = tmp_path / "run"
    (folder / "trace").mkdir(parents=True)
    (folder / "plan.json").write_text(pangu().to_json(), "utf-8")
    events = slower(tracing.planned_events(pangu(), 3), 1.1, 1_700_000_000_000_000)
    for pool in ("rollout", "learner", "cpu"):
        for rank in (0, 1):
            lines = [json.dumps(e) for e in events if (e["pool"], e["rank"]) == (pool, rank)]
            (folder / "trace" / f"{pool}-{rank}.jsonl").write_text("\n".join([*lines, '{"torn": ']), "utf-8")
    return folder


def test_of_a_run(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    assert call("trace", str(run_dir), "-o", str(out)) == 0
    trace = json.loads(out.read_text("utf-8"))
    assert validate_trace(trace) == []
    assert processes(trace) == ["planned", "measured"]
    steps = {e["pid"]: set() for e in trace["traceEvents"] if e["ph"] == "X"}  # type: dict[int, set[int]]
    for e in trace["traceEvents"]:
        if e["ph"] == "X":
            steps[e["pid"]].add(e["args"]["step"])
    assert steps == {1: {1, 2, 3}, 2: {1, 2, 3}}
    assert "(planned and measured)" in capsys.readouterr().err


def test_of_some_steps(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    assert call("trace", str(run_dir), "-o", str(out), "--steps", "1") == 0
    events = json.loads(out.read_text("utf-8"))["traceEvents"]
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {1}


def test_a_run_whose_plan_knows_no_times(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = pangu().model_copy(update={"estimates": (), "cadence": None})
    (run_dir / "plan.json").write_text(bare.to_json(), "utf-8")
    out = tmp_path / "trace.json"
    assert call("trace", str(run_dir), "-o", str(out)) == 0
    assert "note: the plan is not in it: how long" in capsys.readouterr().err
    assert processes(json.loads(out.read_text("utf-8"))) == ["pool rollout", "pool learner", "pool cpu"]
    assert call("trace", str(run_dir), "-o", str(out), "--plan", str(run_dir / "plan.json")) == 1
    assert "error[RLF4004]" in capsys.readouterr().err
    (tmp_path / "timed.json").write_text(pangu().to_json(), "utf-8")
    assert call("trace", str(run_dir), "-o", str(out), "--plan", str(tmp_path / "timed.json")) == 0
    assert processes(json.loads(out.read_text("utf-8"))) == ["planned", "measured"]


def test_of_a_plan_and_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(pangu().to_json(), "utf-8")
    for source in (tmp_path / "plan.json", PANGU):
        assert call("trace", str(source), "-o", str(tmp_path / "t.json"), "--steps", "2") == 0
        assert validate_trace(json.loads((tmp_path / "t.json").read_text("utf-8"))) == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["EMPTY"], "is not a run folder: it has no plan.json"),
        (["RUN", "-D", "batch.count=8"], "a run has its plan"),
        (["RUN", "-o", "EMPTY"], "is a folder"),
        (["RUN", "--stage", "samples=soon"], "write NAME=SECONDS"),
        ([str(PANGU), "--plan", "x.json"], "give the run's folder"),
        (["BARE"], "has no events"),
    ],
)
def test_wrong_usage(
    argv: list[str], words: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("empty", "bare"):
        (tmp_path / name).mkdir()
    (tmp_path / "bare" / "plan.json").write_text(pangu().to_json(), "utf-8")
    places = {"RUN": run_dir, "EMPTY": tmp_path / "empty", "BARE": tmp_path / "bare"}
    assert call("trace", *(str(places.get(word, word)) for word in argv)) == 2
    assert words in capsys.readouterr().err
