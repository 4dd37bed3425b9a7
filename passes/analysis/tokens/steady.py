"""The period that a play settles into, measured from its firing times."""

from __future__ import annotations

from fractions import Fraction

from rlflow.passes.analysis.tokens.game import play
from rlflow.passes.analysis.tokens.graph import TokenGraph
from rlflow.passes.analysis.tokens.rates import firings
from rlflow.passes.analysis.tokens.walks import Arc, components
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Steady:
    """`period`: seconds per repetition of the graph, exactly. From repetition `after` on, all firing times repeat every
    `cyclicity` repetitions."""

    period: Fraction
    after: int
    cyclicity: int


def steady_state(graph: TokenGraph, most: int = 10_000) -> Steady | None:
    """Play until the firing times repeat, up to `most` repetitions; None where they do not by then or the graph is
    stuck.

    Firing times are a max-plus linear recursion over the last few repetitions, so once these look the same again, moved
    in time, they repeat for ever (Cohen, Dubois, Quadrat, Viot 1985). Raises ValueError for inconsistent rates and
    for a graph that is not strongly connected, whose parts drift apart.
    """
    arcs = [Arc(graph.index[e.src], graph.index[e.dst], i) for i, e in enumerate(graph.closed)]
    if len(components(len(graph.stages), arcs)) != 1:
        raise ValueError("the graph is not strongly connected")
    number = firings(graph)
    # Firing k of dst looks back this many repetitions of src at most.
    memory = max((edge.tokens // (edge.produces * number[edge.src]) + 2 for edge in graph.closed), default=1)
    periods = 4 * memory
    while True:
        game = play(graph, min(periods, most), lambda name, _: graph.stage(name).exact)
        if game.stuck:
            return None
        first = graph.stages[0].name
        seen: dict[tuple[Fraction, ...], int] = {}
        for last in range(memory, min(periods, most) + 1):
            origin = Fraction(game.starts[first][(last - 1) * number[first]])
            window = tuple(
                Fraction(start) - origin
                for name, count in number.items()
                for start in game.starts[name][(last - memory) * count : last * count]
            )
            if window in seen:
                before = seen[window]
                then = Fraction(game.starts[first][(before - 1) * number[first]])
                return Steady((origin - then) / (last - before), before, last - before)
            seen[window] = last
        if periods >= most:
            return None
        periods *= 4
