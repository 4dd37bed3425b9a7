"""Deadlock: the cycle on which every stage waits for the next, and a play that shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph, cycle_text
from rlflow.passes.analysis.tokens.rates import firings
from rlflow.passes.analysis.tokens.walks import Arc, shortest_cycle
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Deadlock:
    """No stage of `cycle` fires beyond its count in `fired`, however the others fire.

    `cycle`: edges, each into the source of the next; the source of the first is where the last one ends.
    `fired`: how often each stage of the cycle fires before it is stuck. `blocked`: all stages that come to a stop,
    among them those that only wait for the cycle.
    """

    cycle: tuple[TokenEdge, ...]
    fired: Mapping[str, int]
    blocked: tuple[str, ...]

    @property
    def text(self) -> str:
        waits = "; ".join(
            f"{edge.dst} waits for {edge.consumes} on {edge.text}"
            if edge.consumes > 1
            else f"{edge.dst} waits on {edge.text}"
            for edge in self.cycle
        )
        return f"{cycle_text(self.cycle)}: {waits}"


class DeadlockError(ValueError):
    """The graph has a cycle without tokens, so it has no period. `cycle` are its edges."""

    def __init__(self, cycle: tuple[TokenEdge, ...]) -> None:
        super().__init__(f"a cycle without tokens: {cycle_text(cycle)}")
        self.cycle = cycle


@dataclass(frozen=True, slots=True)
class Replay:
    """What a play of the game did. `fired`: firings of every stage. `tokens`: what the cycle's edges hold at the end.

    `stuck`: at the end every edge of the cycle holds fewer tokens than its reader needs. Its only source is the stage
    before it on the cycle, which waits as well, so no firing on the cycle can follow.
    """

    fired: Mapping[str, int]
    tokens: tuple[int, ...]
    stuck: bool


def empty_cycle(graph: TokenGraph) -> tuple[TokenEdge, ...] | None:
    """A shortest cycle of edges that all start empty, or None.

    A marked graph is live iff there is none (Commoner, Holt, Even, Pnueli 1971). Durations play no part: a cycle of
    stages that take no time deadlocks as well. With rates a graph without one can still deadlock: ask `deadlock`.
    """
    return _cycle(graph, lambda number, edge: edge.tokens == 0)


def require_live(graph: TokenGraph) -> None:
    """Raises DeadlockError for a cycle without tokens."""
    cycle = empty_cycle(graph)
    if cycle is not None:
        raise DeadlockError(cycle)


def deadlock(graph: TokenGraph) -> Deadlock | None:
    """Why the graph cannot run for ever, or None where it can; with any rates.

    It can iff every stage can fire as often as the repetition vector says (Lee, Messerschmitt 1987): the order in which
    enabled stages fire does not matter, since no token is wanted by two of them. Raises ValueError for inconsistent
    rates.
    """
    target = firings(graph)
    fired, tokens = _play(graph, target)
    blocked = tuple(stage.name for stage in graph.stages if fired[stage.name] < target[stage.name])
    if not blocked:
        return None
    stuck = set(blocked)
    # Whoever supplies a stage that waits has not finished its period either, so waits lead to waits, and in a circle.
    cycle = _cycle(graph, lambda number, edge: edge.dst in stuck and tokens[number] < edge.consumes)
    assert cycle is not None
    return Deadlock(cycle, {edge.src: fired[edge.src] for edge in cycle}, blocked)


def replay(graph: TokenGraph, certificate: Deadlock | tuple[TokenEdge, ...], periods: int = 2) -> Replay:
    """Play until nothing can fire, every stage at most `periods` times its firings per period.

    `certificate`: what `deadlock` or `empty_cycle` gave. Raises ValueError where its edges are not a cycle of the
    graph.
    """
    cycle = certificate.cycle if isinstance(certificate, Deadlock) else certificate
    at = [graph.closed.index(edge) for edge in cycle]
    if not cycle or any(edge.dst != cycle[(i + 1) % len(cycle)].src for i, edge in enumerate(cycle)):
        raise ValueError("the edges of the certificate are not a cycle")
    fired, tokens = _play(graph, {name: count * periods for name, count in firings(graph).items()})
    left = tuple(tokens[number] for number in at)
    return Replay(fired, left, all(held < edge.consumes for held, edge in zip(left, cycle, strict=True)))


def _play(graph: TokenGraph, limits: Mapping[str, int]) -> tuple[dict[str, int], list[int]]:
    """Fire what can fire, each stage at most so often: firings of the stages, tokens of the closed edges."""
    tokens = [edge.tokens for edge in graph.closed]
    into, out = graph.closed_of()
    fired = dict.fromkeys(into, 0)
    ready = list(into)
    while ready:
        name = ready.pop()
        times = limits[name] - fired[name]
        for number in into[name]:
            edge = graph.closed[number]
            possible = tokens[number] // edge.consumes
            # A self-loop gets back what it gave (its rates are equal): it allows any number of firings or none.
            times = min(times, possible) if edge.src != name or not possible else times
        if not times:
            continue
        fired[name] += times
        for number in into[name]:
            tokens[number] -= times * graph.closed[number].consumes
        for number in out[name]:
            tokens[number] += times * graph.closed[number].produces
            ready.append(graph.closed[number].dst)
    return fired, tokens


def _cycle(graph: TokenGraph, chosen: Callable[[int, TokenEdge], bool]) -> tuple[TokenEdge, ...] | None:
    arcs = [
        Arc(graph.index[edge.src], graph.index[edge.dst], number)
        for number, edge in enumerate(graph.closed)
        if chosen(number, edge)
    ]
    found = shortest_cycle(len(graph.stages), arcs)
    return None if found is None else tuple(graph.closed[arc.edge] for arc in found)
