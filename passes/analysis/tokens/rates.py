"""Consistency: how often each stage fires in a period."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from math import gcd, lcm

from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Inconsistent:
    """A closed walk whose rates do not multiply to one: some edge of it starves or grows without bound.

    `walk`: edges, each with whether it is walked from `src` to `dst`. `gain`: how many times as often its first stage
    would have to fire as it does.
    """

    walk: tuple[tuple[TokenEdge, bool], ...]
    gain: Fraction

    @property
    def text(self) -> str:
        names = [edge.src if forward else edge.dst for edge, forward in self.walk]
        rates = ", ".join(f"{edge.text} makes {edge.produces} and takes {edge.consumes}" for edge, _ in self.walk)
        return f"{' - '.join([*names, names[0]])}: {names[0]} would fire {self.gain} times as often as itself ({rates})"


def repetition(graph: TokenGraph) -> Mapping[str, int] | Inconsistent:
    """The smallest numbers of firings that return every edge to its tokens; per connected part where there are several.

    Every edge fixes q[dst] / q[src] = produces / consumes, so a tree of edges fixes all and the others are checks
    (Lee, Messerschmitt 1987: rank of the topology matrix = stages - 1).
    """
    near: dict[str, list[tuple[TokenEdge, bool]]] = {stage.name: [] for stage in graph.stages}
    for edge in graph.edges:
        near[edge.src].append((edge, True))
        near[edge.dst].append((edge, False))
    rate: dict[str, Fraction] = {}
    above: dict[str, tuple[TokenEdge, bool] | None] = {}
    firings: dict[str, int] = {}
    for root in near:
        if root in rate:
            continue
        rate[root], above[root] = Fraction(1), None
        part, waiting = [root], deque([root])
        while waiting:
            name = waiting.popleft()
            for edge, forward in near[name]:
                other = edge.dst if forward else edge.src
                step = Fraction(edge.produces, edge.consumes)
                found = rate[name] * (step if forward else 1 / step)
                if other not in rate:
                    rate[other], above[other] = found, (edge, forward)
                    part.append(other)
                    waiting.append(other)
                elif rate[other] != found:
                    return Inconsistent(_walk(above, name, other, (edge, forward)), found / rate[other])
        scale = Fraction(lcm(*(rate[name].denominator for name in part)))
        whole = {name: int(rate[name] * scale) for name in part}
        common = gcd(*whole.values())
        firings.update((name, number // common) for name, number in whole.items())
    return {stage.name: firings[stage.name] for stage in graph.stages}


def firings(graph: TokenGraph) -> Mapping[str, int]:
    """`repetition`, where an inconsistent graph is a ValueError."""
    found = repetition(graph)
    if isinstance(found, Inconsistent):
        raise ValueError(f"rates that do not fit together: {found.text}")
    return found


def _walk(
    above: Mapping[str, tuple[TokenEdge, bool] | None], name: str, other: str, last: tuple[TokenEdge, bool]
) -> tuple[tuple[TokenEdge, bool], ...]:
    """From `other` through the tree to `name`, and back over `last`."""
    up_name, up_other = _to_root(above, name), _to_root(above, other)
    while up_name and up_other and up_name[-1] is up_other[-1]:
        up_name.pop()
        up_other.pop()
    return (*((edge, not forward) for edge, forward in up_other), *reversed(up_name), last)


def _to_root(above: Mapping[str, tuple[TokenEdge, bool] | None], name: str) -> list[tuple[TokenEdge, bool]]:
    steps = []
    while (step := above[name]) is not None:
        steps.append(step)
        name = step[0].src if step[1] else step[0].dst
    return steps
