"""The period of any graph against the staleness bound of a model, by its critical cycles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph
from rlflow.passes.analysis.tokens.period import cycle_seconds, cycle_tokens, period


def periods_by_staleness(
    graph: TokenGraph, weight_edges: Sequence[TokenEdge], bounds: Iterable[int]
) -> Mapping[int, Fraction]:
    """Seconds per step for each bound: every weight edge of the model holds bound + 1 tokens.

    Holds for stages that share pools too: an order edge can close a cycle that no bound makes faster.
    Errors as in `period`; ValueError for a negative bound and for an edge of another graph.
    """
    return {bound: period(_bounded(graph, weight_edges, bound)[0]).value for bound in bounds}


def least_useful_staleness(graph: TokenGraph, weight_edges: Sequence[TokenEdge]) -> int | None:
    """The smallest bound beyond which the period stays the same; None where every larger bound is faster still.

    Each critical cycle found says how many tokens its weight edges need to be no slower than the graph without them, so
    the bound rises straight to the next cycle. Errors as in `periods_by_staleness`.
    """
    free = graph
    for edge in weight_edges:
        free = free.without(edge)
    bound = 0
    while True:
        bounded, raised = _bounded(graph, weight_edges, bound)
        found = period(bounded)
        limit = period(free).value
        if found.value <= limit:
            return bound
        if limit == 0:
            return None
        passed = sum(id(edge) in raised for edge in found.cycle)
        others = cycle_tokens(found.cycle) - passed * (bound + 1)
        bound = ceil((cycle_seconds(graph, found.cycle) / limit - others) / passed) - 1


def _bounded(graph: TokenGraph, weight_edges: Sequence[TokenEdge], bound: int) -> tuple[TokenGraph, set[int]]:
    """The graph with bound + 1 tokens on these edges, and the identities of the new edges."""
    if bound < 0:
        raise ValueError(f"a staleness bound of {bound} is negative")
    edges = list(graph.edges)
    raised = []
    for edge in weight_edges:
        at = edges.index(edge)
        edges[at] = replace(edge, tokens=bound + 1)
        raised.append(at)
    bounded = replace(graph, edges=tuple(edges))
    return bounded, {id(bounded.edges[at]) for at in raised}
