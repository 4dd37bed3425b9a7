"""The period: seconds between two firings of a stage in the long run, and the cycle that sets it.

In a live, strongly connected marked graph every stage fires once per `max over cycles of seconds / tokens`, and a
schedule start(k) = start + period * k exists exactly for periods from there on (Reiter 1968; Baccelli, Cohen, Olsder,
Quadrat 1992).
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph, from_first_stage, require_single_rate
from rlflow.passes.analysis.tokens.howard import CycleRatio, Weighted, howard
from rlflow.passes.analysis.tokens.liveness import require_live
from rlflow.passes.analysis.tokens.walks import Arc, components
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Component:
    """A strongly connected part: its stages, the period that it would have alone and its critical cycle.

    A stage on no cycle is a part with period 0 and no cycle: nothing but its inputs holds it back.
    """

    stages: tuple[str, ...]
    period: Fraction
    cycle: tuple[TokenEdge, ...]


@dataclass(frozen=True, slots=True)
class Period:
    """Seconds per firing of the whole graph, exactly; 0 where no cycle limits it.

    `cycle`: the critical cycle, edges in order, from the stage that comes first in the graph. `starts`: seconds per
    stage so that start(k) = starts + period * k keeps every edge; the least is 0. `components`: in topological order.
    `effective`: the period of each stage when everything runs as soon as it can: that of the slowest part from which
    it can be reached, or its own.
    """

    value: Fraction
    cycle: tuple[TokenEdge, ...]
    starts: Mapping[str, Fraction]
    components: tuple[Component, ...]
    effective: Mapping[str, Fraction]


def period(graph: TokenGraph) -> Period:
    """Raises DeadlockError for a cycle without tokens, ValueError for a graph with rates (`expand` it first)."""
    require_single_rate(graph)
    require_live(graph)
    scale, edges = weighted(graph)
    parts = components(len(graph.stages), [Arc(e.src, e.dst, i) for i, e in enumerate(edges)])
    part_of, place = [0] * len(graph.stages), [0] * len(graph.stages)
    for number, members in enumerate(parts):
        for at, member in enumerate(members):
            part_of[member], place[member] = number, at
    inner: list[list[int]] = [[] for _ in parts]
    crossing: list[list[int]] = [[] for _ in parts]  # by the part entered
    for number, edge in enumerate(edges):
        (inner if part_of[edge.src] == part_of[edge.dst] else crossing)[part_of[edge.dst]].append(number)
    ratios = [
        _ratio(members, place, [edges[number] for number in own]) for members, own in zip(parts, inner, strict=True)
    ]
    found = tuple(
        Component(
            tuple(graph.stages[member].name for member in members),
            Fraction(ratio.cost, ratio.tokens * scale) if ratio else Fraction(0),
            from_first_stage(graph, [graph.closed[own[at]] for at in ratio.cycle]) if ratio else (),
        )
        for members, own, ratio in zip(parts, inner, ratios, strict=True)
    )
    slowest = max(found, key=lambda part: part.period, default=None)
    value = slowest.period if slowest else Fraction(0)
    starts: list[Fraction] = [Fraction(0)] * len(graph.stages)
    effective: list[Fraction] = [part.period for part in found]
    for number, members in enumerate(parts):
        ratio = ratios[number]
        if ratio:
            for member in members:
                starts[member] = Fraction(-ratio.potential[place[member]], ratio.tokens * scale)
        # A schedule of a part stays one for a longer period, and when the whole part is moved.
        later = Fraction(0)
        for at in crossing[number]:
            edge = edges[at]
            later = max(later, starts[edge.src] + Fraction(edge.cost, scale) - value * edge.tokens - starts[edge.dst])
            effective[number] = max(effective[number], effective[part_of[edge.src]])
        for member in members:
            starts[member] += later
    first = min(starts, default=Fraction(0))
    names = [stage.name for stage in graph.stages]
    return Period(
        value,
        slowest.cycle if slowest else (),
        {name: start - first for name, start in zip(names, starts, strict=True)},
        found,
        {name: effective[part] for name, part in zip(names, part_of, strict=True)},
    )


def weighted(graph: TokenGraph) -> tuple[int, list[Weighted]]:
    """A scale that makes every duration an integer, and the closed edges, each with its source's duration as cost."""
    exact = [stage.exact for stage in graph.stages]
    scale = lcm(*(seconds.denominator for seconds in exact))
    costs = [int(seconds * scale) for seconds in exact]
    index = graph.index
    return scale, [Weighted(index[e.src], index[e.dst], costs[index[e.src]], e.tokens) for e in graph.closed]


def cycle_seconds(graph: TokenGraph, cycle: tuple[TokenEdge, ...]) -> Fraction:
    """The durations along a cycle, a stage as often as it is passed."""
    return sum((graph.stage(edge.src).exact for edge in cycle), Fraction(0))


def cycle_tokens(cycle: tuple[TokenEdge, ...]) -> int:
    return sum(edge.tokens for edge in cycle)


def _ratio(members: list[int], place: list[int], edges: list[Weighted]) -> CycleRatio | None:
    """Of a part whose edges are given with numbers of the whole graph; None for a stage without a self-loop."""
    if not edges:
        return None
    return howard(len(members), [edge._replace(src=place[edge.src], dst=place[edge.dst]) for edge in edges])
