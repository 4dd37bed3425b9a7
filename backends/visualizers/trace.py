"""Chrome trace-event JSON of a run: opens in Perfetto, chrome://tracing and MindStudio Insight.

One process per pool, one row (thread) per rank; of a run beside its simulation, two processes with all rows of each. On
a row, a step is a bar that contains the bars of its instructions; bars that overlap without nesting, such as
asynchronous Python calls, go to rows of their own. Arrows follow rows and weights from pool to pool.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.backends.visualizers.trace_arrows import PlacedBar, arrow_events
from rlflow.plan import Plan

Event = Mapping[str, Any]
"""Keys: pool, rank, instruction (its id), stage, kind, step, start_us, duration_us, version, and perhaps tokens."""


_Rank = tuple[str, int]
"""Pool and rank in it."""

_ORDER = {"X": 0, "C": 1, "s": 2, "f": 3}
"""Of events at one time: a bar before the arrows that start or end in it."""


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
    _write(path, build_trace(events, plan))


def write_overlay(path: str | Path, planned: Iterable[Event], measured: Iterable[Event], plan: Plan) -> None:
    """Write the trace of `build_overlay`. OSError from the disk."""
    _write(path, build_overlay(planned, measured, plan))


def _write(path: str | Path, trace: dict[str, Any]) -> None:
    text = json.dumps(trace, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def build_trace(events: Iterable[Event], plan: Plan) -> dict[str, Any]:
    """The trace as an object, one process a pool. KeyError when an event lacks one of its keys."""
    ranks = _by_rank(events)
    out = _Out(plan)
    for pid, pool in enumerate(_pools_in_order(plan, ranks), start=1):
        out.process(pid, f"pool {pool}")
        tid = 0
        for rank in sorted(rank for name, rank in ranks if name == pool):
            tid = out.rank(ranks[pool, rank], pool, rank, pid, tid, "")
    out.arrows()
    return out.trace()


def build_overlay(planned: Iterable[Event], measured: Iterable[Event], plan: Plan) -> dict[str, Any]:
    """The trace of a run and of its simulation, as two processes `planned` and `measured`, with a row for every rank.

    Both start their first common training step at one time. KeyError when an event lacks one of its keys.
    """
    sides = [("planned", _by_rank(planned)), ("measured", _by_rank(measured))]
    _align(plan, *(ranks for _, ranks in sides))
    out = _Out(plan)
    for pid, (name, ranks) in enumerate(sides, start=1):
        if not ranks:
            continue
        out.process(pid, name)
        tid = 0
        for pool in _pools_in_order(plan, ranks):
            for rank in sorted(rank for found, rank in ranks if found == pool):
                tid = out.rank(ranks[pool, rank], pool, rank, pid, tid, f"{pool} ")
        out.arrows()
    return out.trace()


def _by_rank(events: Iterable[Event]) -> dict[_Rank, list[_Bar]]:
    """The bars of every (pool, rank), by start, the longer of two first."""
    ranks: dict[_Rank, list[_Bar]] = defaultdict(list)
    for event in events:
        start = round(event["start_us"])
        end = max(start, round(event["start_us"] + event["duration_us"]))
        ranks[str(event["pool"]), int(event["rank"])].append(_Bar(start, end, event))
    for bars in ranks.values():
        bars.sort(key=lambda b: (b.start, -b.end, str(b.event["instruction"])))
    return dict(ranks)


def _pools_in_order(plan: Plan, ranks: Iterable[_Rank]) -> list[str]:
    """The pools that have a bar: those of the plan in its order, then others by name."""
    used = {pool for pool, _ in ranks}
    known = [pool.name for pool in plan.pools]
    return [*(name for name in known if name in used), *sorted(used - set(known))]


def _align(plan: Plan, *sides: dict[_Rank, list[_Bar]]) -> None:
    """Move the side that starts the first common training step earlier, so that both start it at one time."""
    phases = _phases(plan)
    starts: list[dict[int, int]] = []
    for ranks in sides:
        first: dict[int, int] = {}
        for bars in ranks.values():
            for bar in bars:
                step = int(bar.event["step"])
                if str(bar.event["instruction"]) not in phases:
                    first[step] = min(bar.start, first.get(step, bar.start))
        starts.append(first)
    common = set.intersection(*(set(first) for first in starts))
    if not common:
        return
    latest = max(first[min(common)] for first in starts)
    for ranks, first in zip(sides, starts, strict=True):
        shift = latest - first[min(common)]
        for bars in ranks.values():
            for bar in bars:
                bar.start, bar.end = bar.start + shift, bar.end + shift


class _Out:
    """Collects the events of a trace: metadata apart, all others sorted by time in the end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._functions = {pool.name for pool in plan.pools if pool.device == "functions"}
        self._phases = _phases(plan)
        self._names: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._placed: list[PlacedBar] = []
        """Bars of the process that is being written, of the first rank of every pool."""
        self._lead: set[str] = set()
        self._arrows = 0

    def process(self, pid: int, name: str) -> None:
        self._names += _metadata("process", pid, None, name, pid)

    def rank(self, bars: list[_Bar], pool: str, rank: int, pid: int, tid: int, prefix: str) -> int:
        """Write the rows of one rank; the next free row."""
        is_functions = pool in self._functions
        leads = pool not in self._lead
        self._lead.add(pool)
        rows = _rows(bars, nested=not is_functions)
        for number, row in enumerate(rows):
            title = f"{prefix}worker {rank}" if is_functions else f"{prefix}rank {rank}"
            title += f" ({number + 1})" if len(rows) > 1 and number else ""
            self._names += _metadata("thread", pid, tid, title, tid)
            if not is_functions and number == 0:
                self._events += _step_bars(row, pid, tid, self._phases)
            self._events += [_instruction_bar(bar, pid, tid) for bar in row.bars]
            if leads:
                self._placed += [PlacedBar(pid, tid, bar.start, bar.end, bar.event) for bar in row.bars]
            tid += 1
        self._events += _token_rate(bars, pid, f"{prefix}rank {rank}")
        return tid

    def arrows(self) -> None:
        """Arrows between the bars placed since the last call."""
        found = arrow_events(self._plan, self._placed, first_id=self._arrows + 1)
        self._arrows += len(found) // 2
        self._events += found
        self._placed, self._lead = [], set()

    def trace(self) -> dict[str, Any]:
        plan = self._plan
        events = sorted(self._events, key=lambda e: (e["ts"], -e.get("dur", 0), _ORDER[e["ph"]]))
        return {
            "displayTimeUnit": "ms",
            "otherData": {"flow": plan.flow, "cluster": plan.cluster, "rlflow_version": plan.rlflow_version},
            "traceEvents": [*self._names, *events],
        }


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


def _token_rate(bars: list[_Bar], pid: int, rank: str) -> list[dict[str, Any]]:
    """A counter of tokens per second, up while an instruction that counts tokens runs."""
    out = []
    for bar in bars:
        tokens = bar.event.get("tokens")
        if tokens is None or bar.end <= bar.start:
            continue
        for time, value in ((bar.start, round(tokens / (bar.end - bar.start) * 1e6)), (bar.end, 0)):
            name = f"tokens/s of {rank}"
            out.append({"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": time, "args": {"tokens/s": value}})
    return out
