"""A graph with rates as one without: a copy of a stage for each of its firings in a period."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph
from rlflow.passes.analysis.tokens.rates import firings
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Expansion:
    """`graph` has single rates and `copies` gives the names of a stage's firings in it, in order."""

    graph: TokenGraph
    copies: Mapping[str, tuple[str, ...]]


def expand(graph: TokenGraph, limit: int = 100_000) -> Expansion:
    """The marked graph with the same firing times; its period is that of one repetition vector.

    Firing k of `dst` takes the tokens k * consumes ... of the edge in the order in which they were put on it; the token
    number n beyond the initial ones comes from firing n // produces of `src` (Lee, Messerschmitt 1987; Sriram,
    Bhattacharyya 2000). Raises ValueError for inconsistent rates and for more than `limit` copies.
    """
    number = firings(graph)
    total = sum(number.values())
    if total > limit:
        raise ValueError(f"{total} firings per period are more than {limit}")
    copies = {
        name: (name,) if count == 1 else tuple(f"{name}[{i}]" for i in range(count)) for name, count in number.items()
    }
    stages = tuple(
        replace(stage, name=copy, serial=stage.serial and number[stage.name] == 1)
        for stage in graph.stages
        for copy in copies[stage.name]
    )
    edges: list[TokenEdge] = []
    for edge in graph.edges:
        edges += _expanded(edge, number[edge.src], copies)
    for loop in graph.closed[len(graph.edges) :]:
        if number[loop.src] > 1:  # the copies take turns; one copy alone stays serial
            edges += _expanded(loop, number[loop.src], copies)
    return Expansion(TokenGraph(stages, tuple(edges)), copies)


def _expanded(edge: TokenEdge, per_period: int, copies: Mapping[str, tuple[str, ...]]) -> list[TokenEdge]:
    fewest: dict[tuple[int, int], int] = {}
    for k in range(len(copies[edge.dst])):
        first = k * edge.consumes - edge.tokens
        for maker in range(first // edge.produces, (first + edge.consumes - 1) // edge.produces + 1):
            periods_ago, copy = -(maker // per_period), maker % per_period
            # Of two edges between the same copies, the one with fewer tokens is the stricter.
            fewest[copy, k] = min(periods_ago, fewest.get((copy, k), periods_ago))
    return [
        replace(edge, src=copies[edge.src][copy], dst=copies[edge.dst][k], tokens=tokens, produces=1, consumes=1)
        for (copy, k), tokens in sorted(fewest.items(), key=lambda item: (item[0][1], item[0][0]))
    ]
