"""The eviction problem without a solver, where one phase decides.

One phase that overflows is a covering knapsack: with pages of one size the cheapest first are optimal; a few odd pages
(tails, whole objects) are tried in all combinations. The optimum for one phase is a lower bound for all phases, so
where it happens to satisfy the others too, it is the optimum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product

from rlflow.passes.analysis.memory.program import Column, Program, Row, RowKind
from rlflow.values import dataclass

MAX_ODD = 10
"""Pages of other sizes that are tried in all combinations: 1024 of them at most."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Pages per column, and a bound in seconds: no choice of pages or fractions of pages costs less."""

    counts: tuple[int, ...]
    bound_seconds: float


def solve_greedily(program: Program) -> Solution | None:
    """The exact optimum where every group of phases that share gaps has one that decides, else None: ask a solver."""
    if any(row.kind is not RowKind.DEVICE for row in program.rows):
        return None
    counts = [0] * len(program.columns)
    bound = Fraction(0)
    for group in _groups(program.rows):
        chosen = _decisive(program.columns, group)
        if chosen is None:
            return None
        for column, count in chosen.items():
            counts[column] = count
        bound += max(_relaxed(program.columns, row) for row in group)
    return Solution(tuple(counts), float(bound))


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that share columns, directly or through others."""
    groups: list[tuple[set[int], list[Row]]] = []
    for row in rows:
        columns, members = set(row.terms), [row]
        apart = []
        for other in groups:
            if other[0] & columns:
                columns |= other[0]
                members = other[1] + members
            else:
                apart.append(other)
        groups = [*apart, (columns, members)]
    return [members for _, members in groups]


def _decisive(columns: Sequence[Column], rows: Sequence[Row]) -> dict[int, int] | None:
    """The optimum of the dearest row that satisfies all rows."""
    coverage = Counter(i for row in rows for i in row.terms)
    for row in sorted(rows, key=lambda row: -_relaxed(columns, row)):
        chosen = _cover(columns, row, coverage)
        if chosen is None:
            return None
        if all(sum(k * chosen.get(i, 0) for i, k in other.terms.items()) >= other.least for other in rows):
            return chosen
    return None


def _cover(columns: Sequence[Column], row: Row, coverage: Mapping[int, int]) -> dict[int, int] | None:
    """The cheapest counts that lose `row.least` bytes, of equal ones those that help most other rows; None if there are
    too many sizes, or not enough bytes."""
    order = sorted(row.terms, key=lambda i: (columns[i].seconds / columns[i].unit, -coverage[i], i))
    if sum(columns[i].unit * columns[i].limit for i in order) < row.least:
        return None
    sizes = Counter[int]()
    for i in order:
        sizes[columns[i].unit] += columns[i].limit
    common = max(sizes, key=lambda unit: (sizes[unit], unit))
    odd = [i for i in order if columns[i].unit != common]
    if len(odd) > MAX_ODD or any(columns[i].limit > 1 for i in odd):
        return None
    even = [i for i in order if columns[i].unit == common]
    best: tuple[Fraction, dict[int, int]] | None = None
    for taken in product((1, 0), repeat=len(odd)):
        chosen = {i: 1 for i, take in zip(odd, taken, strict=True) if take}
        left = row.least - sum(columns[i].unit for i in chosen)
        pages = max(0, -(-left // common))
        for i in even:
            if pages:
                chosen[i] = min(pages, columns[i].limit)
                pages -= chosen[i]
        if pages:
            continue
        seconds = sum((columns[i].seconds * n for i, n in chosen.items()), Fraction(0))
        if best is None or seconds < best[0]:
            best = seconds, chosen
    return None if best is None else best[1]


def _relaxed(columns: Sequence[Column], row: Row) -> Fraction:
    """The fractional knapsack: cheapest bytes first."""
    left, seconds = row.least, Fraction(0)
    for i in sorted(row.terms, key=lambda i: (columns[i].seconds / columns[i].unit, i)):
        taken = min(left, columns[i].unit * columns[i].limit)
        seconds += columns[i].seconds * Fraction(taken, columns[i].unit)
        left -= taken
    return seconds
