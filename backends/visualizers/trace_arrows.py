"""Arrows of a trace from pool to pool: from the stage that makes rows to the first that reads them, and from the
publish of weights to the reshard that brings them.

An arrow is a pair of flow events, `s` and `f`, that share an id; each lies in a bar of its row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.plan import Plan


@dataclass(frozen=True, slots=True)
class PlacedBar:
    """A bar with its row. Times in whole microseconds."""

    pid: int
    tid: int
    start: int
    end: int
    event: Mapping[str, Any]


_Arrow = tuple[str, PlacedBar, PlacedBar]
"""Name, from, to."""

_Ran = Mapping[str, Mapping[int, Sequence[PlacedBar]]]
"""Stage and step to bars."""


def arrow_events(plan: Plan, bars: Sequence[PlacedBar], first_id: int) -> list[dict[str, Any]]:
    """Pairs of events with ids from `first_id` on. `bars` hold at most one rank of every pool."""
    out: list[dict[str, Any]] = []
    for number, (name, source, target) in enumerate([*_rows(plan, bars), *_weights(plan, bars)], start=first_id):
        category, _, _ = name.partition(" ")
        shared = {"name": name, "cat": category, "id": number}
        leaves = max(source.start, min(source.end - 1, target.start))
        out.append({"ph": "s", **shared, "pid": source.pid, "tid": source.tid, "ts": leaves})
        out.append({"ph": "f", "bp": "e", **shared, "pid": target.pid, "tid": target.tid, "ts": target.start})
    return out


def _rows(plan: Plan, bars: Iterable[PlacedBar]) -> Iterator[_Arrow]:
    """From where rows are made to the first reader on another pool."""
    ran = _runs(bars)
    for stage in plan.stages:
        for producer in sorted(set(stage.inputs.values())):
            for step, readers in ran.get(stage.id, {}).items():
                made = ran.get(producer, {}).get(step)
                if not made or made[-1].event["pool"] == readers[0].event["pool"]:
                    continue
                before = [bar for bar in made if bar.start <= readers[0].start]
                if before and _is_first(plan, ran, producer, stage.id, step):
                    yield f"rows {producer}", before[-1], readers[0]


def _is_first(plan: Plan, ran: _Ran, producer: str, reader: str, step: int) -> bool:
    """Whether no stage on the reader's pool reads these rows earlier in the step: they cross once."""
    bar = ran[reader][step][0]
    others = [stage.id for stage in plan.stages if producer in stage.inputs.values() and stage.id != reader]
    earlier = [ran[other][step][0] for other in others if step in ran.get(other, {})]
    return not any(o.event["pool"] == bar.event["pool"] and _key(o) < _key(bar) for o in earlier)


def _key(bar: PlacedBar) -> tuple[int, int, str]:
    return (bar.start, bar.end, str(bar.event["instruction"]))


def _runs(bars: Iterable[PlacedBar]) -> _Ran:
    """Stage and step to the bars in which it worked. A Python stage works in its call; the `run` only starts that."""
    runs: dict[str, dict[int, list[PlacedBar]]] = defaultdict(lambda: defaultdict(list))
    calls: dict[str, dict[int, list[PlacedBar]]] = defaultdict(lambda: defaultdict(list))
    for bar in bars:
        kind, stage = str(bar.event["kind"]), str(bar.event.get("stage") or "")
        if kind in ("run", "call") and stage:
            (calls if kind == "call" else runs)[stage][int(bar.event["step"])].append(bar)
    return {**runs, **calls}


def _weights(plan: Plan, bars: Iterable[PlacedBar]) -> Iterator[_Arrow]:
    """From the newest publish to each reshard that brings a version that its pool did not have."""
    models = {
        i.id: i.model
        for program in plan.programs
        for listed in (program.step, *(evaluation.instructions for evaluation in program.evaluations))
        for i in listed
        if i.kind in ("publish", "reshard")
    }
    published: dict[str, list[PlacedBar]] = defaultdict(list)
    brought: dict[str, PlacedBar | None] = {}
    kinds = {"publish": 0, "reshard": 1}
    moves = [bar for bar in bars if bar.event["kind"] in kinds]
    for bar in sorted(moves, key=lambda b: (b.start, kinds[str(b.event["kind"])], b.end)):
        instruction = str(bar.event["instruction"])
        model = models.get(instruction)
        if model is None:
            continue
        if bar.event["kind"] == "publish":
            published[model].append(bar)
            continue
        there = [found for found in published[model] if found.end <= bar.end]
        if there and brought.get(instruction) is not there[-1]:
            brought[instruction] = there[-1]
            yield f"weights {model}", there[-1], bar
