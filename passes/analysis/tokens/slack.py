"""How much longer stages may take without lengthening the period."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm

from rlflow.passes.analysis.tokens.graph import TokenGraph
from rlflow.passes.analysis.tokens.period import Period, cycle_seconds, cycle_tokens, period
from rlflow.passes.analysis.tokens.walks import Arc, components, distances, leaving


def slack(graph: TokenGraph, found: Period | None = None) -> Mapping[str, Fraction | None]:
    """Seconds that each stage alone may take longer while the graph keeps its period; None where no cycle limits it.

    A cycle through the stage allows `period * tokens - seconds` more, so the slack is the least of these: the shortest
    cycle through the stage under that length, which the starts of a schedule make a sum of edges that are not negative.
    `found` saves computing the period again. Errors as in `period`.
    """
    found = found or period(graph)
    spare = [
        found.starts[edge.dst] - found.starts[edge.src] - graph.stage(edge.src).exact + found.value * edge.tokens
        for edge in graph.closed
    ]
    scale = lcm(*(length.denominator for length in spare))
    lengths = [int(length * scale) for length in spare]
    arcs = [Arc(graph.index[edge.src], graph.index[edge.dst], i) for i, edge in enumerate(graph.closed)]
    part = [0] * len(graph.stages)
    for number, members in enumerate(components(len(graph.stages), arcs)):
        for member in members:
            part[member] = number
    arcs = [arc for arc in arcs if part[arc.src] == part[arc.dst]]
    group = _tight(len(graph.stages), arcs, lengths)
    size = Counter(group)
    # A cycle that is tight limits all of its stages; to any other stage it is one place, which costs nothing to cross.
    apart = [Arc(group[arc.src], group[arc.dst], arc.edge) for arc in arcs if group[arc.src] != group[arc.dst]]
    out = leaving(len(graph.stages), apart)
    into: list[list[Arc]] = [[] for _ in graph.stages]
    for arc in apart:
        into[arc.dst].append(arc)
    own = {arc.src: lengths[arc.edge] for arc in sorted(arcs, key=lambda arc: -lengths[arc.edge]) if arc.src == arc.dst}
    result: dict[str, Fraction | None] = {}
    for i, stage in enumerate(graph.stages):
        if size[group[i]] > 1:
            result[stage.name] = Fraction(0)
            continue
        away = distances(i, out, lengths)
        rounds = [away[arc.src] + lengths[arc.edge] for arc in into[i]]
        rounds += [own[i]] if i in own else []
        result[stage.name] = Fraction(min(rounds), scale) if rounds else None
    return result


def _tight(nodes: int, arcs: Sequence[Arc], lengths: Sequence[int]) -> list[int]:
    """Of every node the first of those on cycles of length 0 with it, itself where there are none."""
    first = list(range(nodes))
    for members in components(nodes, [arc for arc in arcs if lengths[arc.edge] == 0]):
        for member in members:
            first[member] = min(members)
    return first


def common_slack(graph: TokenGraph, stages: Sequence[str]) -> Fraction | None:
    """Seconds that all these stages may take longer at once, each the same; None where no cycle limits them.

    For the stages of a pool, or the copies of a stage in an expanded graph. The period as a function of the addition
    is a maximum of straight lines, one per cycle: Newton's method from the right meets finitely many of them. Raises
    KeyError for a stage that does not exist; otherwise errors as in `period`.
    """
    found = period(graph)
    chosen = dict.fromkeys(stages)
    alone = slack(graph, found)
    limits = [limit for name in chosen if (limit := alone[name]) is not None]
    if not limits:
        return None
    more = min(limits)
    while True:
        slower = period(graph.with_durations({name: graph.stage(name).exact + more for name in chosen}))
        if slower.value <= found.value:
            return more
        passed = sum(edge.src in chosen for edge in slower.cycle)
        spare = found.value * cycle_tokens(slower.cycle) - cycle_seconds(graph, slower.cycle)
        more = spare / passed
