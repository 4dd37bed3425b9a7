"""Buffer capacities: the cheapest that keep a period, and whether given ones do.

A place in a buffer is taken when the producer starts and freed when the consumer ends, so a capacity is a reverse edge
with the free places as tokens, and a period needs
capacity >= tokens + (start[dst] + duration[dst] - start[src]) / period (compare Stuijk, Geilen, Basten 2006).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import ceil
from typing import Any

from rlflow.passes.analysis.tokens.feasible import earliest_starts
from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph, credit_of, cycle_text, require_single_rate
from rlflow.passes.analysis.tokens.liveness import empty_cycle, require_live
from rlflow.passes.analysis.tokens.period import cycle_seconds, cycle_tokens, period
from rlflow.values import dataclass


class PeriodError(ValueError):
    """No capacities reach the period: `cycle` has none of the buffers on it and is too slow."""

    def __init__(self, wanted: Fraction, cycle: tuple[TokenEdge, ...]) -> None:
        super().__init__(f"a period of {float(wanted):.4g} s is too short for {cycle_text(cycle)}")
        self.cycle = cycle


@dataclass(frozen=True, slots=True)
class Buffers:
    """`capacities` in tokens; `cost` = the sum of capacity times bytes per token; `relaxed`: the least cost when
    parts of tokens were possible, a lower bound."""

    capacities: Mapping[TokenEdge, int]
    cost: int
    relaxed: float


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The cycle that is too slow, or dead, with these capacities; `missing` tokens on it would be enough for it.

    `period`: what the capacities allow, in seconds; None where they deadlock.
    """

    cycle: tuple[TokenEdge, ...]
    missing: int
    period: Fraction | None


def check_capacity(graph: TokenGraph, capacities: Mapping[TokenEdge, int], wanted: Fraction) -> Shortfall | None:
    """Whether the graph keeps the period with these edges bounded: None, or what is wrong. Exact.

    Raises ValueError for rates, for a period that is not positive, for an edge of another graph and for a capacity
    below the initial tokens.
    """
    _require_edges(graph, capacities)
    bounded = graph.with_edges(*(credit_of(edge, capacity) for edge, capacity in capacities.items()))
    cycle = _violated(bounded, wanted)
    if cycle is None:
        return None
    dead = empty_cycle(bounded) is not None
    return Shortfall(
        cycle, _needed(bounded, cycle, wanted) - cycle_tokens(cycle), None if dead else period(bounded).value
    )


def minimal_buffers(graph: TokenGraph, bytes_per_token: Mapping[TokenEdge, int], wanted: Fraction) -> Buffers:
    """The cheapest capacities of these edges with which the graph keeps the period and stays live.

    A mixed-integer programme (HiGHS): capacities are integers, starts are real. Its answer is checked in exact
    arithmetic; what fails the check by a rounding error becomes one more exact constraint. Raises PeriodError where
    no capacities are enough, DeadlockError where the graph has a cycle without tokens, ValueError for rates, a period
    or a size that is not positive and an edge of another graph; ArithmeticError if HiGHS fails.
    """
    _require_edges(graph, bytes_per_token)
    for edge, size in bytes_per_token.items():
        if size <= 0:
            raise ValueError(f"a token of {edge.text} has {size} bytes; sizes are positive")
    require_live(graph)
    cycle = _violated(graph, wanted)
    if cycle is not None:
        raise PeriodError(wanted, cycle)
    buffers = list(bytes_per_token)
    sizes = [bytes_per_token[edge] for edge in buffers]
    if not buffers:
        return Buffers({}, 0, 0.0)
    cuts: list[tuple[list[int], int]] = []
    relaxed = _solve(graph, buffers, sizes, wanted, [], whole=False)
    while True:
        found = _solve(graph, buffers, sizes, wanted, cuts, whole=True)
        capacities = [round(value) for value in found]
        credits = [credit_of(edge, capacity) for edge, capacity in zip(buffers, capacities, strict=True)]
        bounded = graph.with_edges(*credits)
        cycle = _violated(bounded, wanted)
        if cycle is None:
            cost = sum(size * capacity for size, capacity in zip(sizes, capacities, strict=True))
            lower = sum(size * value for size, value in zip(sizes, relaxed, strict=True))
            return Buffers(dict(zip(buffers, capacities, strict=True)), cost, lower)
        number = {id(credit): i for i, credit in enumerate(credits)}
        on = [number[id(edge)] for edge in cycle if id(edge) in number]
        missing = _needed(bounded, cycle, wanted) - cycle_tokens(cycle)
        cut = (on, sum(capacities[i] for i in on) + missing)
        if cut in cuts:
            raise ArithmeticError(f"HiGHS breaks a constraint on {cycle_text(cycle)}")
        cuts.append(cut)


def _require_edges(graph: TokenGraph, edges: Iterable[TokenEdge]) -> None:
    for edge in edges:
        if edge not in graph.edges:
            raise ValueError(f"{edge.text} is not an edge of the graph")


def _violated(graph: TokenGraph, wanted: Fraction) -> tuple[TokenEdge, ...] | None:
    require_single_rate(graph)
    if wanted <= 0:
        raise ValueError(f"a period of {wanted} s is not positive")
    cycle = empty_cycle(graph)
    if cycle is not None:
        return cycle
    starts = earliest_starts(graph, wanted)
    return starts if isinstance(starts, tuple) else None


def _needed(graph: TokenGraph, cycle: tuple[TokenEdge, ...], wanted: Fraction) -> int:
    """The tokens that the cycle needs to keep the period and to be live."""
    return max(1, ceil(cycle_seconds(graph, cycle) / wanted))


def _solve(
    graph: TokenGraph,
    buffers: Sequence[TokenEdge],
    sizes: Sequence[int],
    wanted: Fraction,
    cuts: Sequence[tuple[list[int], int]],
    whole: bool,
) -> list[float]:
    """Capacities. The variables are the starts in periods, then the capacities."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    stages = len(graph.stages)
    entries: list[tuple[int, int, float]] = []
    least: list[float] = []

    def row(later: int, earlier: int, ago: Fraction, *capacities: int) -> None:
        at = len(least)
        if later != earlier:
            entries.extend([(at, later, 1.0), (at, earlier, -1.0)])
        entries.extend((at, stages + i, 1.0) for i in capacities)
        least.append(float(ago))

    def ago(name: str, tokens: int) -> Fraction:
        return graph.stage(name).exact / wanted - tokens

    for edge in graph.closed:
        if edge.src != edge.dst:  # a self-loop says nothing about starts, and is checked
            row(graph.index[edge.dst], graph.index[edge.src], ago(edge.src, edge.tokens))
    for i, edge in enumerate(buffers):
        row(graph.index[edge.src], graph.index[edge.dst], ago(edge.dst, -edge.tokens), i)
    for on, total in cuts:
        row(0, 0, Fraction(total), *on)
    values, rows, columns = (
        np.array([value for _, _, value in entries]),
        np.array([at for at, _, _ in entries]),
        np.array([column for _, column, _ in entries]),
    )
    matrix = coo_array((values, (rows, columns)), shape=(len(least), stages + len(buffers))).tocsr()
    largest = max(sizes)
    low = np.concatenate([np.full(stages, -np.inf), [float(max(1, edge.tokens)) for edge in buffers]])
    options: dict[str, Any] = {"mip_rel_gap": 0}
    result = milp(
        np.concatenate([np.zeros(stages), [size / largest for size in sizes]]),
        integrality=np.concatenate([np.zeros(stages), np.full(len(buffers), int(whole))]),
        bounds=Bounds(low, np.full(stages + len(buffers), np.inf)),
        constraints=LinearConstraint(matrix, np.array(least), np.inf),
        options=options,
    )
    if not result.success:
        raise ArithmeticError(f"HiGHS: {result.message}")
    return [float(value) for value in result.x[stages:]]
