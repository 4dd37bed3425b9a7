"""The eviction program by HiGHS: its relaxation, and the integer program where that is not integral.

Whatever the solver returns is rounded and checked against all rows in integers: rounding never decides whether it fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.passes.analysis.memory.greedy import Solution
from rlflow.passes.analysis.memory.program import Program

TOLERANCE = 1e-6
"""Of HiGHS, for rows and for integrality, relative to the largest coefficient of a row."""

_OPTIMAL, _INFEASIBLE = 0, 2


def solve(program: Program, gap: float = 0.0) -> Solution | None:
    """The cheapest counts, or None if no counts satisfy all rows. Optimal in pages to within the relative `gap` and a
    ten-millionth of the dearest page, the solver's tolerance."""
    if not program.columns:
        return None if any(row.least > 0 for row in program.rows) else Solution((), 0.0)
    relaxed = relaxation(program)
    counts: list[int] | None = None
    if relaxed is not None:
        counts = [round(value) for value in relaxed[0]]
        far = any(abs(value - count) > TOLERANCE for value, count in zip(relaxed[0], counts, strict=True))
        if far or not program.satisfied(counts):
            counts = _integral(program, gap)
    if counts is None:  # either so, or the only plans fit to the byte and the solver does not see that
        counts = [column.limit for column in program.columns]
        if not program.satisfied(counts):
            return None
    counts = irredundant(program, counts)
    # The relaxation is a bound but for rounding; what has been found is one without.
    bound = 0.0 if relaxed is None else min(relaxed[1], float(program.seconds(counts)))
    return Solution(tuple(counts), bound)


def relaxation(program: Program) -> tuple[list[float], float] | None:
    """(values, seconds) of the linear program: fractions of pages are allowed. None if infeasible."""
    return _highs(program, integral=False)


def _integral(program: Program, gap: float) -> list[int] | None:
    """Optimal integers. Rows that are met only within the solver's tolerance are tightened by that and solved again;
    where that is too much, the cheapest pages are added. None too where the host's share is missed by no more."""
    rounded: list[list[int]] = []
    for margin in (0.0, 4 * TOLERANCE):
        found = _highs(program, integral=True, margin=margin, gap=gap)
        if found is None:
            break
        rounded.append([round(value) for value in found[0]])
        if program.satisfied(rounded[-1]):
            return rounded[-1]
    for counts in rounded[:1]:
        _repair(program, counts)
        if program.satisfied(counts):
            return counts
    return None


def _repair(program: Program, counts: list[int]) -> None:
    """Add the cheapest pages that help to every row that is not met; rows of phases first, as the program has them."""
    columns = program.columns
    for row in program.rows:
        missing = row.least - sum(k * counts[i] for i, k in row.terms.items())
        helping = [i for i, k in row.terms.items() if k > 0]
        for i in sorted(helping, key=lambda i: (columns[i].seconds, i)):
            if missing > 0:
                more = min(columns[i].limit - counts[i], -(-missing // row.terms[i]))
                counts[i] += more
                missing -= more * row.terms[i]


def _highs(
    program: Program, *, integral: bool, margin: float = 0.0, gap: float = 0.0
) -> tuple[list[float], float] | None:
    # A quarter of a second, so only where a plan really needs it.
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    size = len(program.columns)
    # One scale for all costs keeps them near 1, where the solver's tolerances are meant.
    scale = max((float(column.seconds) for column in program.columns), default=0.0) or 1.0
    costs = np.array([float(column.seconds) / scale for column in program.columns])
    matrix = np.zeros((len(program.rows), size))
    least = np.zeros(len(program.rows))
    for number, row in enumerate(program.rows):
        largest = max((abs(k) for k in row.terms.values()), default=1)
        for column, coefficient in row.terms.items():
            matrix[number, column] = coefficient / largest
        least[number] = row.least / largest + margin
    constraints: Any = LinearConstraint(matrix, least, np.inf) if program.rows else ()
    result = milp(
        costs,
        integrality=np.full(size, 1 if integral else 0),
        bounds=Bounds(0, np.array([float(column.limit) for column in program.columns])),
        constraints=constraints,
        options={"mip_rel_gap": gap},
    )
    if result.status == _INFEASIBLE:
        return None
    if result.status != _OPTIMAL:
        raise ArithmeticError(f"HiGHS: {result.message}")
    return [float(value) for value in result.x], float(result.fun) * scale


def irredundant(program: Program, counts: Sequence[int]) -> list[int]:
    """Counts from which no page can be taken away, dearest columns first: every page is needed in some phase."""
    left = list(counts)
    slack = [sum(k * left[i] for i, k in row.terms.items()) - row.least for row in program.rows]
    columns = program.columns  # first copies last: what they must cover depends on the evictions
    for i in sorted(range(len(left)), key=lambda i: (columns[i].gap is None, -columns[i].seconds, i)):
        limits = [slack[n] // row.terms[i] for n, row in enumerate(program.rows) if row.terms.get(i, 0) > 0]
        spare = min([left[i], *limits])
        left[i] -= spare
        for n, row in enumerate(program.rows):
            slack[n] -= spare * row.terms.get(i, 0)
    return left
