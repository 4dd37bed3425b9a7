"""Events as rows of a Gantt chart, in columns that a browser reads fast; with idle stretches, ages and the cycle."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from rlflow.backends.visualizers.report.subject import Event, Simulated
from rlflow.backends.visualizers.words import describe_instruction, describe_span
from rlflow.ir.ops import Generate
from rlflow.plan import Instruction, Plan

MAX_EVENTS: Final = 60_000
"""Of one track. Of a longer run the last steps are shown, and the page says so."""

WAITS: Final = frozenset({"take", "put", "wait"})
"""Kinds of instructions in which devices do nothing."""


@dataclass(slots=True)
class _Lane:
    pool: str
    rank: int
    number: int
    end: float = -math.inf


@dataclass(slots=True)
class _Track:
    """Columns of events, by start."""

    lanes: list[_Lane] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    label: list[int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    age: list[int] = field(default_factory=list)


class Labels:
    """The instructions of a plan as a table that events point into."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stages = {stage.id: stage for stage in plan.stages}
        self._cycle = frozenset() if plan.cadence is None else frozenset(plan.cadence.cycle)
        self._phases: dict[str, str] = {}
        self._found: dict[tuple[str, str], Instruction] = {}
        for program in plan.programs:
            lists = [("", program.step), *((e.name, e.instructions) for e in program.evaluations)]
            for phase, instructions in lists:
                for instruction in instructions:
                    self._found.setdefault((program.pool, instruction.id), instruction)
                    if phase:
                        self._phases[instruction.id] = phase
        self._numbers: dict[tuple[str, str], int] = {}
        self.rows: list[dict[str, Any]] = []

    def number(self, event: Event) -> int:
        key = str(event["pool"]), str(event["instruction"])
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.rows.append(self._row(event))
        return self._numbers[key]

    def age(self, event: Event) -> int:
        """Steps between the version that generates and the one that will train on it, had each step one version; -1
        where the event does not generate for a step."""
        stage = self._stages.get(str(event["stage"]))
        if stage is None or stage.phase != "step" or not isinstance(stage.op, Generate) or event["kind"] != "run":
            return -1
        version = event.get("version")
        return -1 if version is None else max(0, int(event["step"]) - 1 - int(version))

    def _row(self, event: Event) -> dict[str, Any]:
        kind, stage = str(event["kind"]), str(event.get("stage") or "")
        instruction = self._found.get((str(event["pool"]), str(event["instruction"])))
        words = f"{kind} {stage}".strip() if instruction is None else describe_instruction(instruction)
        span = self._stages[stage].because.span if stage in self._stages else None
        if instruction is not None:
            span = instruction.because.span
        return {
            "text": words,
            "kind": kind,
            "stage": stage,
            "id": str(event["instruction"]),
            "short": stage if kind in ("run", "call") else words,
            "phase": self._phases.get(str(event["instruction"]), ""),
            "waits": kind in WAITS,
            "cycle": self._on_cycle(str(event["pool"]), kind, stage, instruction),
            "memory": memory_phase(kind, stage, str(event["instruction"])),
            "span": "" if span is None else span_key(span),
            "place": "" if span is None else describe_span(span),
            "inserted": "" if instruction is None else instruction.because.inserted_by,
        }

    def _on_cycle(self, pool: str, kind: str, stage: str, instruction: Instruction | None) -> bool:
        if kind in ("run", "call"):
            return stage in self._cycle
        if instruction is None or kind in WAITS:
            return False
        name = instruction.id.partition(":")[2]
        return bool(self._cycle & {f"{kind} {name}", f"{kind} {name} on {pool}"})


def memory_phase(kind: str, stage: str, instruction: str) -> str:
    """The name under which the memory table of a plan knows an event; empty for most."""
    if kind == "run":
        return stage
    return f"{kind} {instruction.partition(':')[2]}" if kind in ("reshard", "publish") else ""


def span_key(span: Any) -> str:
    """The same for equal places of the source."""
    return f"{span.file}:{span.line}:{span.column}-{span.end_line}:{span.end_column}"


def simulated_track(plan: Plan, simulated: Simulated, labels: Labels) -> dict[str, Any]:
    """The track of a simulation: one row a pool, and more where calls overlap."""
    track = _columns(simulated.events, labels)
    busy = _busy(simulated.events, simulated.work)
    steps = [round(end) for end in simulated.ends]
    last = max([*steps, *(start + length for start, length in zip(track.start, track.length, strict=True))], default=0)
    return _packed(plan, "simulated", track, steps, 1, busy, last) | {
        "warm_up": simulated.warm_up,
        "note": "rank 0 of a pool stands for all its ranks",
    }


def measured_track(plan: Plan, events: Sequence[Event], labels: Labels) -> dict[str, Any]:
    """The track of a run: one row a rank. Time 0 is the start of the first event. A step ends with its last event, but
    not before the step before it."""
    first = min((event["start_us"] for event in events), default=0)
    moved = [{**event, "start_us": event["start_us"] - first} for event in events]
    track = _columns(moved, labels)
    numbers = sorted({int(event["step"]) for event in moved if int(event["step"]) > 0})
    ends = {step: 0 for step in numbers}
    for event in moved:
        if event["step"] in ends and not labels.rows[labels.number(event)]["phase"]:
            ends[event["step"]] = max(ends[event["step"]], round(event["start_us"] + event["duration_us"]))
    last = max((start + length for start, length in zip(track.start, track.length, strict=True)), default=0)
    busy = _busy(moved, {})
    in_order = list(accumulate(ends.values(), max))
    packed = _packed(plan, "measured", track, in_order, numbers[0] if numbers else 1, busy, last)
    return packed | {"warm_up": 0, "note": ""}


def last_steps(events: Sequence[Event]) -> tuple[Sequence[Event], str]:
    """As many of the last steps as MAX_EVENTS allow, and what is left out in words."""
    if len(events) <= MAX_EVENTS:
        return events, ""
    counts: dict[int, int] = defaultdict(int)
    for event in events:
        counts[int(event["step"])] += 1
    kept, total = set[int](), 0
    for step in sorted(counts, reverse=True):
        if kept and total + counts[step] > MAX_EVENTS:
            break
        kept.add(step)
        total += counts[step]
    shown = [event for event in events if int(event["step"]) in kept]
    return shown, f"{len(events)} events were recorded; shown are the {total} of steps {min(kept)} to {max(kept)}"


def _columns(events: Iterable[Event], labels: Labels) -> _Track:
    """Every event on the first lane of its rank that is free: no two overlap."""
    track = _Track()
    lanes: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in sorted(events, key=_in_order):
        start = round(event["start_us"])
        end = max(start, round(event["start_us"] + event["duration_us"]))
        own = lanes[str(event["pool"]), int(event["rank"])]
        lane = next((number for number in own if track.lanes[number].end <= start), None)
        if lane is None:
            lane = len(track.lanes)
            track.lanes.append(_Lane(str(event["pool"]), int(event["rank"]), len(own)))
            own.append(lane)
        track.lanes[lane].end = end
        version = event.get("version")
        track.row.append(lane)
        track.start.append(start)
        track.length.append(end - start)
        track.label.append(labels.number(event))
        track.step.append(int(event["step"]))
        track.version.append(-1 if version is None else int(version))
        track.age.append(labels.age(event))
    return track


def _in_order(event: Event) -> tuple[float, bool, float]:
    """By start; of equal ones those without length first, so that they find room before the others."""
    return event["start_us"], event["duration_us"] > 0, -event["duration_us"]


def _busy(
    events: Iterable[Event], work: Mapping[str, Sequence[tuple[float, float, float]]]
) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """(pool, rank) to the stretches in which its device does something, in order and apart from each other."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["kind"] not in WAITS:
            found[str(event["pool"]), int(event["rank"])].append(
                (event["start_us"], event["start_us"] + event["duration_us"])
            )
    for pool, stretches in work.items():
        found[pool, 0] += [(float(start), float(end)) for start, end, share in stretches if share > 0]
    return {key: _merged(stretches) for key, stretches in found.items()}


def _merged(stretches: list[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        elif end > start:
            out.append((start, end))
    return out


def _packed(
    plan: Plan,
    title: str,
    track: _Track,
    ends: list[int],
    first_step: int,
    busy: Mapping[tuple[str, int], list[tuple[float, float]]],
    last: int,
) -> dict[str, Any]:
    """The track for the page: rows in the order of the plan's pools, starts as differences."""
    order = {pool.name: number for number, pool in enumerate(plan.pools)}
    functions = {pool.name for pool in plan.pools if pool.device == "functions"}
    by_place = sorted(
        range(len(track.lanes)),
        key=lambda n: (order.get(track.lanes[n].pool, len(order)), track.lanes[n].rank, track.lanes[n].number),
    )
    place = {old: new for new, old in enumerate(by_place)}
    lanes = [track.lanes[number] for number in by_place]
    idle_row, idle_start, idle_length = [], [], []
    for row, lane in enumerate(lanes):
        if lane.number or lane.pool in functions:
            continue
        for start, end in _gaps(busy.get((lane.pool, lane.rank), []), last):
            idle_row.append(row)
            idle_start.append(round(start))
            idle_length.append(round(end) - round(start))
    return {
        "title": title,
        "rows": [{"pool": lane.pool, "rank": lane.rank, "lane": lane.number} for lane in lanes],
        "ends": ends,
        "first_step": first_step,
        "last": last,
        "row": [place[row] for row in track.row],
        "start": [after - before for before, after in zip([0, *track.start], track.start, strict=False)],
        "length": track.length,
        "label": track.label,
        "step": track.step,
        "version": track.version,
        "age": track.age,
        "idle": {"row": idle_row, "start": idle_start, "length": idle_length},
    }


def _gaps(stretches: Sequence[tuple[float, float]], last: int) -> Iterable[tuple[float, float]]:
    """What lies between 0, the stretches and `last`, of at least a microsecond."""
    before = 0.0
    for start, end in [*stretches, (float(last), float(last))]:
        if start - before >= 1:
            yield before, start
        before = max(before, end)
