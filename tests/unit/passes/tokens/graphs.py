"""Random token graphs, and slow answers to compare with: by listing all cycles and all markings."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from math import gcd

import networkx as nx
from hypothesis import settings
from hypothesis import strategies as st

from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph, TokenStage
from rlflow.passes.analysis.tokens.rates import firings

few = settings(max_examples=60, deadline=None, derandomize=True)

seconds = st.one_of(
    st.integers(0, 6),
    st.builds(Fraction, st.integers(0, 12), st.sampled_from([1, 2, 3])),
    st.sampled_from([0.1, 0.25, 1.7]),
)


@st.composite
def graphs(draw: st.DrawFn, most: int = 5, tokens: int = 2) -> TokenGraph:
    """Any marked graph: dead or live, connected or not, with parallel edges and self-loops."""
    stages = draw(_stages(most))
    ends = st.sampled_from([stage.name for stage in stages])
    edges = draw(st.lists(st.builds(TokenEdge, ends, ends, st.integers(0, tokens)), max_size=3 * len(stages)))
    return TokenGraph(stages, tuple(edges))


@st.composite
def live_graphs(draw: st.DrawFn, most: int = 5, connected: bool = False) -> TokenGraph:
    """Live by construction: edges that do not go up in a hidden order have a token. `connected`: strongly."""
    stages = draw(_stages(most))
    names = [stage.name for stage in stages]
    hidden = draw(st.permutations(names))
    place = {name: i for i, name in enumerate(hidden)}
    edges = []
    if connected:
        ring = draw(st.permutations(names))
        pairs = [(src, ring[(i + 1) % len(ring)]) for i, src in enumerate(ring)]
    else:
        pairs = []
    pairs += draw(st.lists(st.tuples(st.sampled_from(names), st.sampled_from(names)), max_size=2 * len(names)))
    for src, dst in pairs:
        edges.append(TokenEdge(src, dst, draw(st.integers(int(place[dst] <= place[src]), 2))))
    return TokenGraph(stages, tuple(edges))


@st.composite
def rated_graphs(draw: st.DrawFn, most: int = 4, connected: bool = False) -> TokenGraph:
    """Consistent graphs with rates, dead or live."""
    stages = draw(_stages(most))
    names = [stage.name for stage in stages]
    number = {name: draw(st.integers(1, 4)) for name in names}
    pairs = draw(st.lists(st.tuples(st.sampled_from(names), st.sampled_from(names)), max_size=len(names) + 1))
    if connected:
        pairs += [(src, names[(i + 1) % len(names)]) for i, src in enumerate(names)]
    edges = []
    for src, dst in pairs:
        common = gcd(number[src], number[dst])
        packed = draw(st.integers(1, 2))  # tokens that come and go together, and need not start in whole packs
        produces, consumes = packed * number[dst] // common, packed * number[src] // common
        edges.append(TokenEdge(src, dst, draw(st.integers(0, 2 * produces * consumes)), "", produces, consumes))
    return TokenGraph(stages, tuple(edges))


@st.composite
def _stages(draw: st.DrawFn, most: int) -> tuple[TokenStage, ...]:
    count = draw(st.integers(1, most))
    return tuple(TokenStage("abcdefgh"[i], draw(seconds), draw(st.booleans())) for i in range(count))


def cycles(graph: TokenGraph) -> Iterator[list[TokenEdge]]:
    """All simple cycles; of parallel edges only the one with the fewest tokens."""
    found = nx.DiGraph()
    for edge in graph.closed:
        if not found.has_edge(edge.src, edge.dst) or edge.tokens < found[edge.src][edge.dst]["edge"].tokens:
            found.add_edge(edge.src, edge.dst, edge=edge)
    for names in nx.simple_cycles(found):
        yield [found[src][names[(i + 1) % len(names)]]["edge"] for i, src in enumerate(names)]


def tokens_of(cycle: list[TokenEdge]) -> int:
    return sum(edge.tokens for edge in cycle)


def seconds_of(graph: TokenGraph, cycle: list[TokenEdge]) -> Fraction:
    return sum((Fraction(graph.stage(edge.src).duration) for edge in cycle), Fraction(0))


def is_live(graph: TokenGraph) -> bool:
    return all(tokens_of(cycle) for cycle in cycles(graph))


def period_of(graph: TokenGraph) -> Fraction:
    """The largest ratio over all cycles of a live graph."""
    return max((seconds_of(graph, cycle) / tokens_of(cycle) for cycle in cycles(graph)), default=Fraction(0))


def reachable(graph: TokenGraph, periods: int = 1) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Every vector of firings that some order reaches, each stage at most so many periods, and the tokens there."""
    limit = [firings(graph)[stage.name] * periods for stage in graph.stages]
    start = (0,) * len(limit)
    found = {start: tuple(edge.tokens for edge in graph.closed)}
    waiting = deque([start])
    while waiting:
        counts = waiting.popleft()
        marking = found[counts]
        for i, stage in enumerate(graph.stages):
            if counts[i] == limit[i]:
                continue
            if any(e.dst == stage.name and marking[j] < e.consumes for j, e in enumerate(graph.closed)):
                continue
            after = (*counts[:i], counts[i] + 1, *counts[i + 1 :])
            if after not in found:
                found[after] = tuple(
                    held - e.consumes * (e.dst == stage.name) + e.produces * (e.src == stage.name)
                    for held, e in zip(marking, graph.closed, strict=True)
                )
                waiting.append(after)
    return found


def loop(durations: dict[str, object], tokens: int) -> TokenGraph:
    """Stages in a circle; the last edge has the tokens."""
    names = list(durations)
    last = len(names) - 1
    edges = [TokenEdge(src, names[(i + 1) % len(names)], tokens if i == last else 0) for i, src in enumerate(names)]
    return TokenGraph.of(durations, edges)  # type: ignore[arg-type]
