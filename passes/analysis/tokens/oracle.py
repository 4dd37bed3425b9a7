"""The period as a linear programme, with the worth of seconds and tokens: independent of Howard's iteration.

min period subject to start[dst] - start[src] + period * tokens >= duration[src] on every edge. The dual values are a
circulation with `sum tokens * flow = 1`: the critical cycle, or a mixture where several are critical.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlflow.passes.analysis.tokens.graph import TokenGraph, require_single_rate
from rlflow.passes.analysis.tokens.liveness import require_live
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """`period` in seconds; `per_second[stage]`: seconds of period per second of duration;
    `per_token[i]`: seconds of period per token more on the graph's closed edge i, at most 0.

    Both are local: one whole token more may uncover the next cycle. Where several cycles are critical they are one
    choice among several.
    """

    period: float
    per_second: Mapping[str, float]
    per_token: tuple[float, ...]


def solve(graph: TokenGraph) -> Sensitivity:
    """By HiGHS. Raises DeadlockError for an empty cycle, ValueError for rates, ArithmeticError if HiGHS fails."""
    require_single_rate(graph)
    require_live(graph)  # a cycle without tokens or duration is invisible below
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    stages, edges = len(graph.stages), graph.closed
    longest = max((float(stage.duration) for stage in graph.stages), default=0.0)
    if not edges or longest == 0:
        return Sensitivity(0.0, {stage.name: 0.0 for stage in graph.stages}, (0.0,) * len(edges))
    number = np.arange(len(edges))
    src = np.array([graph.index[edge.src] for edge in edges])
    dst = np.array([graph.index[edge.dst] for edge in edges])
    tokens = np.array([edge.tokens for edge in edges], dtype=float)
    duration = np.array([float(stage.duration) for stage in graph.stages]) / longest
    rows = np.concatenate([number, number, number])
    columns = np.concatenate([dst, src, np.full(len(edges), stages)])
    values = np.concatenate([-np.ones(len(edges)), np.ones(len(edges)), -tokens])
    upper = coo_array((values, (rows, columns)), shape=(len(edges), stages + 1)).tocsr()
    cost = np.zeros(stages + 1)
    cost[stages] = 1
    bounds = [(None, None)] * stages + [(0, None)]
    result = linprog(cost, A_ub=upper, b_ub=-duration[src], bounds=bounds, method="highs")
    if not result.success:
        raise ArithmeticError(f"HiGHS: {result.message}")
    flow = np.maximum(-result.ineqlin.marginals, 0)
    per_second = np.bincount(src, weights=flow, minlength=stages)
    value = float(result.fun) * longest
    return Sensitivity(
        value,
        {stage.name: float(worth) for stage, worth in zip(graph.stages, per_second, strict=True)},
        tuple(float(worth) for worth in -value * flow),
    )
