"""The rules of the Chrome trace-event format that viewers rely on, as a check of finished traces."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from itertools import accumulate
from typing import Any

KNOWN_PHASES = ("M", "X", "B", "E", "C", "i", "s", "f")
LARGEST_ID = 2**31 - 1
"""Of pids and tids: viewers keep them in 32 bits."""
LARGEST_NUMBER = 2**53 - 1
"""Microseconds: above, a reader whose numbers are doubles changes them."""

_Row = tuple[int, int]
_Slice = tuple[int, int, str]


def validate_trace(trace: Any) -> list[str]:
    """What breaks the format's rules, in plain English; empty for a good trace.

    Of the JSON object format: keys of every phase; whole times; pids and tids that fit; names and sort indices of all
    processes and threads that have events; bars of a thread apart or nested, `B` and `E` matched; times of a thread in
    order; flow events in pairs, forwards, each inside a bar.
    """
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["the trace is not an object with a list `traceEvents`"]
    checker = _Checker()
    if trace.get("displayTimeUnit") not in ("ms", "ns"):
        checker.problems.append("displayTimeUnit is neither ms nor ns")
    for index, event in enumerate(trace["traceEvents"]):
        checker.event(f"event {index}", event)
    checker.end()
    return checker.problems


class _Bounds:
    """When a row has a bar."""

    def __init__(self, bars: list[_Slice]) -> None:
        self._starts = sorted(start for start, _, _ in bars)
        self._latest = list(accumulate((end for _, end, _ in sorted(bars)), max))

    def cover(self, time: int) -> bool:
        begun = bisect_right(self._starts, time)
        return begun > 0 and self._latest[begun - 1] >= time


class _Checker:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.named: set[tuple[str, int, int | None]] = set()
        self.used: set[tuple[int, int | None]] = set()
        self.rows: dict[_Row, list[_Slice]] = defaultdict(list)
        self.open: dict[_Row, list[tuple[int, str]]] = defaultdict(list)
        self.latest: dict[_Row, int] = {}
        self.flows: dict[tuple[str, str, Any], dict[str, list[tuple[_Row, int]]]] = defaultdict(
            lambda: {"s": [], "f": []}
        )

    def event(self, where: str, event: Any) -> None:
        if not isinstance(event, dict):
            self.problems.append(f"{where} is not an object")
            return
        phase, pid, tid, name = event.get("ph"), event.get("pid"), event.get("tid"), event.get("name")
        if phase not in KNOWN_PHASES:
            self.problems.append(f"{where} has the phase {phase!r}")
            return
        if type(pid) is not int or type(tid) is not int or not (0 <= pid <= LARGEST_ID and 0 <= tid <= LARGEST_ID):
            self.problems.append(f"{where}: pid and tid must be integers from 0 to {LARGEST_ID}")
            return
        if not isinstance(name, str) or not name:
            self.problems.append(f"{where}: no name")
            return
        if phase == "M":
            self._metadata(where, event, pid, tid, name)
            return
        start = event.get("ts")
        if type(start) is not int or not 0 <= start <= LARGEST_NUMBER:
            self.problems.append(f"{where}: ts must be whole microseconds from 0 to {LARGEST_NUMBER}")
            return
        row = (pid, tid)
        self.used.update({(pid, None), row})
        if start < self.latest.get(row, 0):
            self.problems.append(f"{where}: ts goes back from {self.latest[row]} to {start} on pid {pid} tid {tid}")
        self.latest[row] = max(start, self.latest.get(row, 0))
        self._timed(where, event, phase, row, start, name)

    def _metadata(self, where: str, event: dict[str, Any], pid: int, tid: int, name: str) -> None:
        key = name.removeprefix("process_").removeprefix("thread_")
        args = event.get("args")
        value = args.get(key) if isinstance(args, dict) else None
        if key == "name" and not (isinstance(value, str) and value):
            self.problems.append(f"{where}: {name} without args.name")
        if key == "sort_index" and type(value) is not int:
            self.problems.append(f"{where}: {name} without a whole args.sort_index")
        self.named.add((name, pid, tid if name.startswith("thread") else None))

    def _timed(self, where: str, event: dict[str, Any], phase: str, row: _Row, start: int, name: str) -> None:
        if phase == "X":
            length = event.get("dur")
            if type(length) is not int or not 0 <= length <= LARGEST_NUMBER - start:
                self.problems.append(f"{where}: X needs dur, whole microseconds, not negative")
                return
            self.rows[row].append((start, start + length, name))
        elif phase == "B":
            self.open[row].append((start, name))
        elif phase == "E":
            if not self.open[row]:
                self.problems.append(f"{where}: E without B on pid {row[0]} tid {row[1]}")
                return
            begun, opened = self.open[row].pop()
            if opened != name:
                self.problems.append(f"{where}: E of `{name}` ends the B of `{opened}`")
            self.rows[row].append((begun, start, opened))
        elif phase == "C":
            values = event.get("args")
            if not isinstance(values, dict) or not values or not all(_is_number(v) for v in values.values()):
                self.problems.append(f"{where}: a counter's args must be numbers")
        elif phase in ("s", "f"):
            identity = event.get("id")
            if not isinstance(identity, int | str) or isinstance(identity, bool):
                self.problems.append(f"{where}: a flow event needs an id")
                return
            if not isinstance(event.get("cat"), str):
                self.problems.append(f"{where}: a flow event needs a cat")
                return
            self.flows[event["cat"], name, identity][phase].append((row, start))

    def end(self) -> None:
        for pid, thread in sorted(self.used, key=str):
            for word in ("name", "sort_index"):
                key = f"{'process' if thread is None else 'thread'}_{word}"
                if (key, pid, thread) not in self.named:
                    self.problems.append(f"pid {pid} tid {thread}: no metadata event {key}")
        for (pid, tid), begun in sorted(self.open.items()):
            self.problems += [f"pid {pid} tid {tid}: B of `{name}` at {start} us has no E" for start, name in begun]
        for (pid, tid), bars in sorted(self.rows.items()):
            self.problems += [f"pid {pid} tid {tid}: {text}" for text in _overlaps(bars)]
        bounds = {row: _Bounds(bars) for row, bars in self.rows.items()}
        for (category, name, identity), ends in self.flows.items():
            self._flow(f"flow {identity} `{name}` ({category})", ends["s"], ends["f"], bounds)

    def _flow(
        self,
        what: str,
        starts: list[tuple[_Row, int]],
        ends: list[tuple[_Row, int]],
        bounds: dict[_Row, _Bounds],
    ) -> None:
        if len(starts) != 1 or len(ends) != 1:
            self.problems.append(f"{what}: {len(starts)} starts and {len(ends)} ends")
            return
        if ends[0][1] < starts[0][1]:
            self.problems.append(f"{what} ends at {ends[0][1]} us, before its start at {starts[0][1]}")
        for row, time in (starts[0], ends[0]):
            if row not in bounds or not bounds[row].cover(time):
                self.problems.append(f"{what}: no bar at {time} us on pid {row[0]} tid {row[1]}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def _overlaps(bars: list[_Slice]) -> list[str]:
    problems, around = [], list[tuple[int, str]]()
    for start, end, name in sorted(bars, key=lambda b: (b[0], -b[1])):
        while around and around[-1][0] <= start:
            around.pop()
        if around and end > around[-1][0]:
            problems.append(f"`{name}` at {start} us partially overlaps `{around[-1][1]}`")
        around.append((end, name))
    return problems
