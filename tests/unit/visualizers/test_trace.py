"""Traces keep the Chrome format's rules whatever the events, and the checker sees each breach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.backends.visualizers.trace import build_trace, write_trace
from rlflow.backends.visualizers.trace_rules import validate_trace
from rlflow.plan import Plan


def event(instruction: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    kind, _, stage = instruction.rpartition(".")[0].rpartition(".")[2], ".", instruction.rpartition(".")[2]
    base = {"pool": "main", "rank": 0, "instruction": instruction, "stage": stage, "kind": kind or "run"}
    return {**base, "step": 1, "start_us": start, "duration_us": duration, "version": 0, **more}


def two_steps() -> list[dict[str, Any]]:
    events = []
    for step, offset in ((1, 0), (2, 1000)):
        events += [
            event("take.batch", offset, 10, step=step),
            event("run.samples", offset + 10, 500, step=step, tokens=4000),
            event("run.score", offset + 510, 300, step=step, pool="cpu", rank=0),
            event("run.train", offset + 600, 300, step=step, version=step - 1),
        ]
    events.append(event("heldout.run.answers", 2000, 100, step=2))
    return events


def bars(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X"]


def test_file(plan: Plan, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", two_steps(), plan)
    trace = json.loads((tmp_path / "trace.json").read_text("utf-8"))
    assert validate_trace(trace) == []
    assert trace["displayTimeUnit"] == "ms"
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["pool cpu", "pool main"]


def test_a_step_contains_its_instructions(plan: Plan) -> None:
    found = bars(build_trace(two_steps(), plan))
    steps = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in found if e["cat"] == "step"}
    assert steps == {"step 1": (0, 900), "step 2": (1000, 1900), "evaluation heldout": (2000, 2100)}
    samples = next(e for e in found if e["name"] == "run samples")
    assert samples["args"] == {"instruction": "run.samples", "step": 1, "version": 0, "tokens": 4000}


def test_overlapping_calls_get_rows_of_their_own(plan: Plan) -> None:
    calls = [event("run.score", start, 100, pool="cpu") for start in (0, 50, 60, 120)]
    trace = build_trace(calls, plan)
    assert validate_trace(trace) == []
    assert sorted(e["tid"] for e in bars(trace)) == [0, 0, 1, 2]


def test_no_events(plan: Plan) -> None:
    assert build_trace([], plan)["traceEvents"] == []
    assert validate_trace(build_trace([], plan)) == []


def test_token_counter(plan: Plan) -> None:
    counters = [e for e in build_trace(two_steps(), plan)["traceEvents"] if e["ph"] == "C"]
    assert [e["args"]["tokens/s"] for e in counters] == [8_000_000, 0, 8_000_000, 0]


times = st.floats(0, 1e4, allow_nan=False)
random_event = st.builds(
    lambda i, s, d, step, pool, rank: event(f"run.{i}", s, d, step=step, pool=pool, rank=rank),
    st.sampled_from(["samples", "score", "train"]),
    times,
    times,
    st.integers(0, 3),
    st.sampled_from(["main", "cpu", "elsewhere"]),
    st.integers(0, 1),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(random_event, max_size=25))
def test_any_events_make_a_valid_trace(events: list[dict[str, Any]]) -> None:
    trace = build_trace(events, PLAN)
    assert validate_trace(trace) == []
    assert sum(e["cat"] != "step" for e in bars(trace)) == len(events)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda t: t.update(displayTimeUnit="s"), "displayTimeUnit"),
        (lambda t: t["traceEvents"][-1].update(pid="main"), "pid and tid must be integers"),
        (lambda t: t["traceEvents"][-1].update(tid=True), "pid and tid must be integers"),
        (lambda t: t["traceEvents"][-1].update(ts=1.5), "whole microseconds"),
        (lambda t: t["traceEvents"][-1].update(ph="Q"), "phase"),
        (lambda t: t["traceEvents"].pop(0), "no metadata event process_name"),
        (lambda t: t["traceEvents"].append(overlapping(t)), "partially overlaps"),
        (lambda t: t["traceEvents"].append("x"), "not an object"),
    ],
)
def test_the_checker_sees(plan: Plan, change: Any, finding: str) -> None:
    trace = build_trace(two_steps(), plan)
    assert validate_trace(trace) == []
    change(trace)
    assert any(finding in problem for problem in validate_trace(trace))


def test_the_checker_wants_the_object_form() -> None:
    assert validate_trace([]) == ["the trace is not an object with a list `traceEvents`"]


def overlapping(trace: dict[str, Any]) -> dict[str, Any]:
    first = next(e for e in bars(trace) if e["name"] == "run samples")
    return {**first, "ts": first["ts"] + 1}


PLAN: Plan


@pytest.fixture(autouse=True)
def _plan_for_hypothesis(plan: Plan) -> None:
    global PLAN  # hypothesis runs many examples per call; a fixture per example would be refused
    PLAN = plan
