"""How many tokens an edge can ever hold."""

from __future__ import annotations

from fractions import Fraction
from math import floor, lcm

from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph
from rlflow.passes.analysis.tokens.liveness import require_live
from rlflow.passes.analysis.tokens.rates import firings
from rlflow.passes.analysis.tokens.walks import Arc, components, distances, leaving


def max_tokens(graph: TokenGraph, edge: TokenEdge) -> int | None:
    """The most tokens that the edge can hold at once, however its stages are timed; None where there is no limit.

    Between two stages it bounds the items under way as well, from the start of the firing that makes them to the end
    of the one that takes them: the depth that an engine has to accept. The tokens of a cycle never change, and the
    edge can be filled with all of its poorest one: the minimum over the cycles through it (Commoner, Holt, Even,
    Pnueli 1971). With rates the tokens count in shares of a period, and the result is an upper bound. Raises
    DeadlockError where a cycle has no token, ValueError for an edge of another graph.
    """
    if edge not in graph.closed:
        raise ValueError(f"{edge.text} is not an edge of the graph")
    require_live(graph)
    number = firings(graph)
    share = [Fraction(1, number[e.src] * e.produces) for e in graph.closed]
    scale = lcm(*(s.denominator for s in share))
    lengths = [int(s * scale) * e.tokens for s, e in zip(share, graph.closed, strict=True)]
    back = distances(graph.index[edge.dst], leaving(len(graph.stages), _arcs(graph)), lengths).get(
        graph.index[edge.src]
    )
    if back is None:
        return None
    own = Fraction(scale, number[edge.src] * edge.produces)
    return edge.tokens + floor(back / own)


def unbounded_edges(graph: TokenGraph) -> tuple[TokenEdge, ...]:
    """The edges on no cycle: without a credit edge a fast producer fills them without end."""
    part = [0] * len(graph.stages)
    for number, members in enumerate(components(len(graph.stages), _arcs(graph))):
        for member in members:
            part[member] = number
    return tuple(edge for edge in graph.edges if part[graph.index[edge.src]] != part[graph.index[edge.dst]])


def _arcs(graph: TokenGraph) -> list[Arc]:
    return [Arc(graph.index[edge.src], graph.index[edge.dst], i) for i, edge in enumerate(graph.closed)]
