"""What sets the period, and what would help."""

from __future__ import annotations

from fractions import Fraction

from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenEdgeKind, TokenGraph
from rlflow.passes.analysis.tokens.period import Period, cycle_seconds, cycle_tokens, period
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The critical cycle: `seconds` of work along it and its `tokens`; their ratio is the period.

    `one_more_token`: the period with one token more on an edge of the cycle, for each edge that can have one.
    `without`: the period if a stage of the cycle took no time, the most that speeding it up can bring.
    A period that stays shows that another cycle is as slow.
    """

    period: Fraction
    cycle: tuple[TokenEdge, ...]
    seconds: Fraction
    tokens: int
    one_more_token: tuple[tuple[TokenEdge, Fraction], ...]
    without: tuple[tuple[str, Fraction], ...]
    durations: tuple[Fraction, ...]

    @property
    def text(self) -> str:
        """``9.5 s per period: rollout (10 s) -> train (9 s) -> rollout, 19 s with 2 tokens``."""
        if not self.cycle:
            return "no cycle limits the period"
        names = [f"{e.src} ({_number(s)} s)" for e, s in zip(self.cycle, self.durations, strict=True)]
        tokens = f"{self.tokens} token{'s' if self.tokens > 1 else ''}"
        walk = " -> ".join([*names, self.cycle[0].src])
        return f"{_number(self.period)} s per period: {walk}, {_number(self.seconds)} s with {tokens}"


def bottleneck(graph: TokenGraph, found: Period | None = None) -> Bottleneck:
    """`found` saves computing the period again. Errors as in `period`.

    Serial loops and the order of a pool get no tokens: one more would mean a second machine, not a deeper queue.
    """
    found = found or period(graph)
    movable = [e for e in found.cycle if e.kind not in (TokenEdgeKind.SERIAL, TokenEdgeKind.ORDER)]
    return Bottleneck(
        found.value,
        found.cycle,
        cycle_seconds(graph, found.cycle),
        cycle_tokens(found.cycle),
        tuple((edge, period(graph.with_tokens(edge, edge.tokens + 1)).value) for edge in movable),
        tuple(
            (name, period(graph.with_durations({name: 0})).value)
            for name in dict.fromkeys(edge.src for edge in found.cycle)
        ),
        tuple(graph.stage(edge.src).exact for edge in found.cycle),
    )


def _number(seconds: Fraction) -> str:
    return f"{float(seconds):.4g}"
