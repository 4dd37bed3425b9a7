"""The token game with a clock: every stage starts as soon as its tokens are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush

from rlflow.passes.analysis.tokens.graph import Seconds, TokenGraph
from rlflow.passes.analysis.tokens.rates import firings
from rlflow.values import dataclass

DurationOf = Callable[[str, int], Seconds]
"""Seconds of a stage's firing, which counts from 0; may be drawn at random."""


@dataclass(frozen=True, slots=True)
class Event:
    """A firing of a stage starts (takes its tokens) or ends (puts its tokens), at so many seconds."""

    time: Seconds
    stage: str
    firing: int
    end: bool


@dataclass(frozen=True, slots=True)
class Game:
    """`starts[stage][k]`, `ends[stage][k]` in seconds; `events` in an order in which tokens could really move;
    `stuck`: the stages that had fewer firings than asked for when nothing could move any more, so a deadlock."""

    starts: Mapping[str, tuple[Seconds, ...]]
    ends: Mapping[str, tuple[Seconds, ...]]
    events: tuple[Event, ...]
    stuck: tuple[str, ...]


def play(graph: TokenGraph, periods: int, duration: DurationOf | None = None) -> Game:
    """Let every stage fire `periods` times what the repetition vector says, with the graph's durations or those given.

    Edges keep their order: a firing of a stage that is not serial hands over after the firings before it. Fractions and
    integers are kept exact. Raises ValueError for inconsistent rates and for a negative duration.
    """
    seconds = duration or (lambda name, firing: graph.stage(name).duration)
    limit = {name: count * periods for name, count in firings(graph).items()}
    tokens = [edge.tokens for edge in graph.closed]
    into, out = graph.closed_of()
    starts: dict[str, list[Seconds]] = {name: [] for name in into}
    ends: dict[str, list[Seconds]] = {name: [] for name in into}
    events: list[Event] = []
    running: list[tuple[Seconds, int, str, int]] = []
    begun = 0

    def start_all(name: str, now: Seconds) -> None:
        nonlocal begun
        while len(starts[name]) < limit[name] and all(tokens[i] >= graph.closed[i].consumes for i in into[name]):
            for i in into[name]:
                tokens[i] -= graph.closed[i].consumes
            firing = len(starts[name])
            takes = seconds(name, firing)
            if takes < 0:
                raise ValueError(f"firing {firing} of `{name}` takes {takes} s")
            end = max(now + takes, ends[name][-1]) if ends[name] else now + takes
            starts[name].append(now)
            ends[name].append(end)
            events.append(Event(now, name, firing, False))
            heappush(running, (end, begun, name, firing))
            begun += 1

    for name in into:
        start_all(name, 0)
    while running:
        now, _, name, firing = heappop(running)
        events.append(Event(now, name, firing, True))
        for i in out[name]:
            tokens[i] += graph.closed[i].produces
        for i in out[name]:
            start_all(graph.closed[i].dst, now)
    return Game(
        {name: tuple(times) for name, times in starts.items()},
        {name: tuple(times) for name, times in ends.items()},
        tuple(events),
        tuple(name for name in into if len(starts[name]) < limit[name]),
    )
