"""Whether a period can be kept, and by which starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph, from_first_stage, require_single_rate
from rlflow.passes.analysis.tokens.howard import Weighted
from rlflow.passes.analysis.tokens.period import weighted


def earliest_starts(graph: TokenGraph, period: Fraction) -> Mapping[str, Fraction] | tuple[TokenEdge, ...]:
    """The least starts from 0 on with start(k) = starts + period * k on every edge, or the cycle that is too slow for
    it.

    The starts are longest walks under the weights `seconds - period * tokens` (Bellman 1958), so a cycle of positive
    weight is what forbids the period: its seconds are more than `period` times its tokens. A cycle without tokens whose
    stages take no time has weight 0 and is not seen here. Raises ValueError for a graph with rates.
    """
    require_single_rate(graph)
    scale, edges = weighted(graph)
    costs = [edge.cost * period.denominator - period.numerator * scale * edge.tokens for edge in edges]
    starts, cycle = _longest(len(graph.stages), edges, costs)
    if cycle is not None:
        return from_first_stage(graph, [graph.closed[number] for number in cycle])
    unit = scale * period.denominator
    return {stage.name: Fraction(start, unit) for stage, start in zip(graph.stages, starts, strict=True)}


def _longest(nodes: int, edges: Sequence[Weighted], costs: Sequence[int]) -> tuple[list[int], list[int] | None]:
    """Longest walks that may begin anywhere with 0, or a cycle of positive cost."""
    starts = [0] * nodes
    last = [-1] * nodes
    changed = True
    while changed:
        changed = False
        for number, edge in enumerate(edges):
            start = starts[edge.src] + costs[number]
            if start > starts[edge.dst]:
                starts[edge.dst], last[edge.dst] = start, number
                changed = True
        if changed:
            # The chosen edges close a circle only where the circle has positive cost (Tarjan 1981).
            cycle = _circle(edges, last)
            if cycle is not None:
                return starts, cycle
    return starts, None


def _circle(edges: Sequence[Weighted], last: Sequence[int]) -> list[int] | None:
    seen = [-1] * len(last)
    for root in range(len(last)):
        node = root
        while seen[node] < 0 and last[node] >= 0:
            seen[node] = root
            node = edges[last[node]].src
        if last[node] >= 0 and seen[node] == root:
            cycle = [last[node]]
            while edges[cycle[-1]].src != node:
                cycle.append(last[edges[cycle[-1]].src])
            return cycle[::-1]
    return None
