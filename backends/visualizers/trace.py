"""Chrome trace-event JSON of a run: opens in Perfetto, chrome://tracing and MindStudio Insight.

One process per pool, one row (thread) per rank. On a row, a step is a bar that contains the bars of its instructions;
bars that overlap without nesting, such as asynchronous Python calls, go to rows of their own.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.plan import Plan

Event = Mapping[str, Any]
"""Keys: pool, rank, instruction (its id), stage, kind, step, start_us, duration_us, version, and perhaps tokens."""


@dataclass(slots=True)
class _Bar:
    """One instruction's time on a row, in whole microseconds."""

    start: int
    end: int
    event: Event


@dataclass(slots=True)
class _Row:
    """Bars that are pairwise nested or apart; `open` holds the ends of the bars around the next one."""

    bars: list[_Bar] = field(default_factory=list)
    open: list[int] = field(default_factory=list)

    def accepts(self, bar: _Bar, nested: bool) -> bool:
        """Put the bar here unless it would partially overlap another; bars must come sorted by start."""
        while self.open and self.open[-1] <= bar.start:
            self.open.pop()
        if self.open and (not nested or bar.end > self.open[-1]):
            return False
        self.open.append(bar.end)
        self.bars.append(bar)
        return True


def write_trace(path: str | Path, events: Iterable[Event], plan: Plan) -> None:
    """Write the trace file. Times are taken as they are: microseconds from any common start. OSError from the disk."""
    text = json.dumps(build_trace(events, plan), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def build_trace(events: Iterable[Event], plan: Plan) -> dict[str, Any]:
    """The trace as an object. KeyError when an event lacks one of its keys."""
    per_rank: dict[tuple[str, int], list[_Bar]] = defaultdict(list)
    for event in events:
        start = round(event["start_us"])
        end = max(start, round(event["start_us"] + event["duration_us"]))
        per_rank[str(event["pool"]), int(event["rank"])].append(_Bar(start, end, event))
    functions = {pool.name for pool in plan.pools if pool.device == "functions"}
    phases = _phases(plan)
    known = [pool.name for pool in plan.pools]
    names = [*known, *sorted({pool for pool, _ in per_rank} - set(known))]
    used = [name for name in names if any(pool == name for pool, _ in per_rank)]
    out: list[dict[str, Any]] = []
    for pid, pool in enumerate(used, start=1):
        out += _metadata("process", pid, None, f"pool {pool}", pid)
        tid = 0
        for rank in sorted(rank for name, rank in per_rank if name == pool):
            bars = sorted(per_rank[pool, rank], key=lambda b: (b.start, -b.end, str(b.event["instruction"])))
            is_functions = pool in functions
            rows = _rows(bars, nested=not is_functions)
            for number, row in enumerate(rows):
                title = f"worker {rank}" if is_functions else f"rank {rank}"
                title += f" ({number + 1})" if len(rows) > 1 and number else ""
                out += _metadata("thread", pid, tid, title, tid)
                if not is_functions and number == 0:
                    out += _step_bars(row, pid, tid, phases)
                out += [_instruction_bar(bar, pid, tid) for bar in row.bars]
                tid += 1
            out += _token_rate(bars, pid, rank)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"flow": plan.flow, "cluster": plan.cluster, "rlflow_version": plan.rlflow_version},
        "traceEvents": out,
    }


def validate_trace(trace: Any) -> list[str]:
    """What breaks the format's rules, in plain English; empty for a good trace."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["the trace is not an object with a list `traceEvents`"]
    problems = [] if trace.get("displayTimeUnit") in ("ms", "ns") else ["displayTimeUnit is neither ms nor ns"]
    named: set[tuple[str, Any, Any]] = set()
    rows: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    used: set[tuple[int, int | None]] = set()
    for index, event in enumerate(trace["traceEvents"]):
        where = f"event {index}"
        if not isinstance(event, dict):
            problems.append(f"{where} is not an object")
            continue
        phase, pid, tid = event.get("ph"), event.get("pid"), event.get("tid")
        if phase not in ("M", "X", "C", "i"):
            problems.append(f"{where} has the phase {phase!r}")
            continue
        if type(pid) is not int or type(tid) is not int:
            problems.append(f"{where}: pid and tid must be integers")
            continue
        if phase == "M":
            named.add((str(event.get("name")), pid, tid if "thread" in str(event.get("name")) else None))
            continue
        used.update({(pid, None), (pid, tid)})
        start, length = event.get("ts"), event.get("dur", 0)
        if type(start) is not int or type(length) is not int or length < 0:
            problems.append(f"{where}: ts and dur must be whole microseconds, dur not negative")
        elif phase == "X":
            if "dur" not in event:
                problems.append(f"{where}: X without dur")
            rows[pid, tid].append((start, start + length, str(event.get("name"))))
        elif phase == "C" and not all(isinstance(v, int | float) for v in event.get("args", {"": ""}).values()):
            problems.append(f"{where}: a counter's args must be numbers")
    for pid, thread in sorted(used, key=str):
        for word in ("name", "sort_index"):
            key = f"{'process' if thread is None else 'thread'}_{word}"
            if (key, pid, thread) not in named:
                problems.append(f"pid {pid} tid {thread}: no metadata event {key}")
    for (pid, tid), bars in sorted(rows.items()):
        problems += [f"pid {pid} tid {tid}: {text}" for text in _overlaps(bars)]
    return problems


def _overlaps(bars: list[tuple[int, int, str]]) -> list[str]:
    problems, around = [], list[tuple[int, str]]()
    for start, end, name in sorted(bars, key=lambda b: (b[0], -b[1])):
        while around and around[-1][0] <= start:
            around.pop()
        if around and end > around[-1][0]:
            problems.append(f"`{name}` at {start} us partially overlaps `{around[-1][1]}`")
        around.append((end, name))
    return problems


def _phases(plan: Plan) -> dict[str, str]:
    """Instruction id to the evaluation it belongs to; those of the step are left out."""
    return {
        i.id: evaluation.name
        for program in plan.programs
        for evaluation in program.evaluations
        for i in evaluation.instructions
    }


def _rows(bars: list[_Bar], nested: bool) -> list[_Row]:
    rows: list[_Row] = []
    for bar in bars:
        if not any(row.accepts(bar, nested) for row in rows):
            rows.append(_Row())
            rows[-1].accepts(bar, nested)
    return rows


def _step_bars(row: _Row, pid: int, tid: int, phases: Mapping[str, str]) -> list[dict[str, Any]]:
    """A bar around each run of neighbouring instructions of one step, or of one evaluation."""
    spans: list[tuple[tuple[int, str], int, int]] = []
    for bar in row.bars:
        key = (int(bar.event["step"]), phases.get(str(bar.event["instruction"]), ""))
        if spans and bar.start < spans[-1][2]:  # inside the bar before it, whatever it belongs to
            continue
        if spans and spans[-1][0] == key:
            spans[-1] = (key, spans[-1][1], bar.end)
        else:
            spans.append((key, bar.start, bar.end))
    return [
        _bar(f"evaluation {phase}" if phase else f"step {step}", "step", pid, tid, start, end, {"step": step})
        for (step, phase), start, end in spans
    ]


def _instruction_bar(bar: _Bar, pid: int, tid: int) -> dict[str, Any]:
    event = bar.event
    args = {key: event[key] for key in ("instruction", "step", "version", "tokens") if event.get(key) is not None}
    name = " ".join(part for part in (str(event["kind"]), str(event.get("stage") or "")) if part)
    return _bar(name, str(event["kind"]), pid, tid, bar.start, bar.end, args)


def _bar(name: str, category: str, pid: int, tid: int, start: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args
    }  # fmt: skip


def _metadata(what: str, pid: int, tid: int | None, name: str, sort: int) -> list[dict[str, Any]]:
    place = {"pid": pid, "tid": 0 if tid is None else tid}
    return [
        {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}},
        {"ph": "M", "name": f"{what}_sort_index", **place, "args": {"sort_index": sort}},
    ]


def _token_rate(bars: list[_Bar], pid: int, rank: int) -> list[dict[str, Any]]:
    """A counter of tokens per second, up while an instruction that counts tokens runs."""
    out = []
    for bar in bars:
        tokens = bar.event.get("tokens")
        if tokens is None or bar.end <= bar.start:
            continue
        for time, value in ((bar.start, round(tokens / (bar.end - bar.start) * 1e6)), (bar.end, 0)):
            name = f"tokens/s of rank {rank}"
            out.append({"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": time, "args": {"tokens/s": value}})
    return out
