"""Seconds of every stage and step from the events that the ranks of a run recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.profile.engine_fit import Spell

Event = Mapping[str, Any]
ByStep = dict[int, int]
"""Step to microseconds or tokens."""


@dataclass
class Recorded:
    """Of every step: what each stage took on its slowest rank, and what it worked on, on all ranks."""

    stages: dict[str, ByStep] = field(default_factory=lambda: defaultdict(dict))
    """Microseconds of a stage itself, without stages that ran inside it. Of a Python function: until its result was
    there, from the moment at which it had its samples."""
    calls: dict[str, ByStep] = field(default_factory=lambda: defaultdict(dict))
    """Microseconds of the calling pool: handing over samples, fetching the result."""
    instructions: dict[str, ByStep] = field(default_factory=lambda: defaultdict(dict))
    """By instruction id: those that belong to no stage."""
    tokens: dict[str, ByStep] = field(default_factory=lambda: defaultdict(dict))
    spells: dict[str, dict[int, list[Spell]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    """Of the engines of generate stages, of all ranks."""


def recorded(events: Iterable[Event]) -> Recorded:
    """What the events of all ranks say, as the ranks write them into the run folder."""
    by_rank: dict[tuple[str, int], list[Event]] = defaultdict(list)
    calls: dict[tuple[int, str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["kind"] == "call":
            calls[event["rank"], event["stage"], event["step"]].append(event)
        else:
            by_rank[event["pool"], event["rank"]].append(event)
    found = Recorded()
    called = {stage for _, stage, _ in calls}
    ran = {event["stage"] for own in by_rank.values() for event in own if event["kind"] == "run"}
    for (_, rank), own in sorted(by_rank.items()):
        # Between pools a take waits for the stage that fills the queue: it is no work of that stage.
        work = [event for event in own if event["kind"] not in ("take", "put") or event["stage"] not in ran]
        _add_rank(found, sorted(work, key=_by_start), rank, called, calls)
    return found


def _add_rank(
    found: Recorded,
    events: list[Event],
    rank: int,
    called: set[str],
    calls: Mapping[tuple[int, str, int], list[Event]],
) -> None:
    """Add one rank: its times replace smaller ones of others, its tokens count on top."""
    stages: dict[tuple[str, int], int] = defaultdict(int)
    others: dict[tuple[str, int], int] = defaultdict(int)
    pairs: dict[tuple[str, int], tuple[list[Event], list[Event]]] = defaultdict(lambda: ([], []))
    for event, own_us in zip(events, exclusive_us(events), strict=True):
        stage, step = event["stage"], event["step"]
        if not stage:
            others[event["instruction"], step] += own_us
        elif stage in called:
            pairs[stage, step][event["kind"] == "wait"].append(event)
        else:
            stages[stage, step] += own_us
        if event.get("tokens") is not None:
            by_step = found.tokens[stage]
            by_step[step] = by_step.get(step, 0) + event["tokens"]
        if event.get("engine"):
            found.spells[stage][step] += [Spell(*row) for row in event["engine"]]
    hands: dict[tuple[str, int], int] = defaultdict(int)
    for (stage, step), (starts, waits) in pairs.items():
        ordered = sorted(calls[rank, stage, step], key=_by_start)
        for start, wait, call in zip(starts, waits, ordered, strict=False):
            took, hand = _call(start, wait, call)
            stages[stage, step] += took
            hands[stage, step] += hand
    for times, into in ((stages, found.stages), (others, found.instructions), (hands, found.calls)):
        for (name, step), us in times.items():
            into[name][step] = max(us, into[name].get(step, 0))


def _call(start: Event, wait: Event, call: Event) -> tuple[int, int]:
    """(from the hand-over to the result, of the calling pool) of one asynchronous call, in microseconds.

    A result that was there before somebody waited for it costs the pool no waiting, only the fetching.
    """
    handed = _end(start)
    waited, fetched = wait["start_us"], _end(wait)
    there = min(max(call["start_us"] + call["result_us"], handed), fetched)
    return there - handed, start["duration_us"] + fetched - max(waited, there)


def exclusive_us(events: Sequence[Event]) -> list[int]:
    """Microseconds of every event without the events inside it. `events` of one rank, by start, the longer one first.

    A selection that runs earlier stages once more contains their events.
    """
    out = [int(event["duration_us"]) for event in events]
    open_: list[int] = []
    for index, event in enumerate(events):
        while open_ and event["start_us"] >= _end(events[open_[-1]]) - 1:  # start and length are rounded
            open_.pop()
        if open_:
            out[open_[-1]] -= int(event["duration_us"])
        open_.append(index)
    return [max(us, 0) for us in out]


def _by_start(event: Event) -> tuple[int, int]:
    return event["start_us"], -event["duration_us"]


def _end(event: Event) -> int:
    return int(event["start_us"] + event["duration_us"])
