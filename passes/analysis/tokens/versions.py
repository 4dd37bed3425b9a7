"""Which version of a model made the batch that a step trains on, by playing the graph with versions on its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rlflow.passes.analysis.tokens.game import DurationOf, play
from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenEdgeKind, TokenGraph
from rlflow.passes.analysis.tokens.rates import firings


def versions_used(
    graph: TokenGraph,
    train: str,
    steps: int,
    *,
    newest: bool = False,
    duration: DurationOf | None = None,
) -> tuple[int | None, ...]:
    """For each firing of `train`, the oldest version of its model among what it consumes; its age is step - version.

    Version = number of finished firings of `train` whose weights have arrived. Firing k of `train` puts version k + 1
    on its weight edges; these and the weight edges behind them (a sync, a publish) carry versions, and so does data
    made from them. Weight edges that start elsewhere belong to other models. Initial tokens of such edges are version
    0; None where nothing on the way carries a version. `newest`: a reader uses the newest version that has arrived
    when it starts, not the one that its token carries. Raises ValueError where the graph is stuck before, KeyError
    where there is no stage `train`.
    """
    graph.stage(train)
    periods = -(-steps // firings(graph)[train])
    game = play(graph, periods, duration)
    if game.stuck:
        raise ValueError(f"deadlock: {', '.join(game.stuck)} cannot fire {periods} periods")
    ours = _weight_edges_of(graph, train)
    queues: list[deque[int | None]] = []
    made_from_them = _reached({graph.closed[i].dst for i in ours}, graph)
    for i, edge in enumerate(graph.closed):
        carries = i in ours or (edge.kind is TokenEdgeKind.DATA and edge.src in made_from_them)
        queues.append(deque([0 if carries else None] * edge.tokens))
    arrived = dict.fromkeys(ours, 0)
    into, out = graph.closed_of()
    making: dict[tuple[str, int], int | None] = {}
    used: list[int | None] = []
    for event in game.events:
        if event.end:
            made = making.pop((event.stage, event.firing))
            for i in out[event.stage]:
                edge = graph.closed[i]
                if i in ours and event.stage == train:
                    version: int | None = event.firing + 1
                elif i in ours or edge.kind is TokenEdgeKind.DATA:
                    version = made
                else:
                    version = None
                queues[i].extend([version] * edge.produces)
                if i in ours and version is not None:
                    arrived[i] = max(arrived[i], version)
            continue
        found: list[int] = []
        for i in into[event.stage]:
            taken = [queues[i].popleft() for _ in range(graph.closed[i].consumes)]
            if newest and i in ours:
                taken = [arrived[i]]
            found += [version for version in taken if version is not None]
        making[event.stage, event.firing] = min(found, default=None)
        if event.stage == train:
            used.append(making[event.stage, event.firing])
    return tuple(used[:steps])


def ages(versions: Sequence[int | None]) -> tuple[int | None, ...]:
    """The age in steps of each batch: step - version."""
    return tuple(None if version is None else step - version for step, version in enumerate(versions))


def _weight_edges_of(graph: TokenGraph, train: str) -> set[int]:
    """The weight edges that are reached from `train` over weight edges alone."""
    weights: dict[str, list[tuple[int, TokenEdge]]] = {stage.name: [] for stage in graph.stages}
    for i, edge in enumerate(graph.closed):
        if edge.kind is TokenEdgeKind.WEIGHTS:
            weights[edge.src].append((i, edge))
    found: set[int] = set()
    waiting = [train]
    while waiting:
        for i, edge in weights[waiting.pop()]:
            if i not in found:
                found.add(i)
                waiting.append(edge.dst)
    return found


def _reached(stages: set[str], graph: TokenGraph) -> set[str]:
    """These stages and all that data reaches from them."""
    data: dict[str, list[str]] = {stage.name: [] for stage in graph.stages}
    for edge in graph.edges:
        if edge.kind is TokenEdgeKind.DATA:
            data[edge.src].append(edge.dst)
    found = set(stages)
    waiting = list(stages)
    while waiting:
        for name in data[waiting.pop()]:
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found
