"""Objective 1, fully pipelined: the least period max_P T_P(n_P) for which the pools find room.

A period is achievable iff the pools find room at the least sizes n_P with T_P(n_P) at most the period. That only
changes at the times the pools can have, so bisecting down to one such time, and refuting the next smaller period, is
exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Timed(Protocol):
    """A pool of so many devices, and its time."""

    @property
    def devices(self) -> int: ...
    @property
    def seconds(self) -> float: ...


T = TypeVar("T", bound=Timed)

Least = Callable[[float], T | None]
"""The smallest pool whose time is at most the argument; None when no pool is fast enough."""

Fit = Callable[[Sequence[Sequence[int | None]]], tuple[int, ...] | None]
"""`wanted[pool][type]` to a device type for every pool, or None without room. Must grant less where it grants more."""

STOP_HALVING = 1e-4
"""Relative width of the interval below which the search steps from one time of a pool to the next."""

MOST_WIDENING = 1000.0
"""Multiple of a lower bound up to which a period is looked for before any period will do."""


@dataclass(frozen=True, slots=True)
class Sizing(Generic[T]):
    """A size and a device type for every pool, and the time of the slowest."""

    period: float
    plans: tuple[T, ...]
    kinds: tuple[int, ...]

    @property
    def devices(self) -> int:
        return sum(plan.devices for plan in self.plans)


def sizing_at(pools: Sequence[Sequence[Least[T]]], fit: Fit, limit: float) -> Sizing[T] | None:
    """The smallest pools with a period of at most `limit`; None when there are none, or no room for them."""
    table: list[list[T | None]] = []
    for kinds in pools:
        row = [least(limit) for least in kinds]
        if all(plan is None for plan in row):
            return None
        table.append(row)
    chosen = fit([[None if plan is None else plan.devices for plan in row] for row in table])
    if chosen is None:
        return None
    plans = [plan for row, kind in zip(table, chosen, strict=True) if (plan := row[kind]) is not None]
    return Sizing(max(plan.seconds for plan in plans), tuple(plans), chosen)


def least_period(
    pools: Sequence[Sequence[Least[T]]], fit: Fit, upper: float = math.inf, lower: float = 0.0
) -> Sizing[T] | None:
    """The least period of at most `upper`, with the smallest pools that reach it; None when there is none.

    `pools[pool][type]` are the times of a pool on a device type, as step functions of its size. `lower` is a period
    that is known to be too short or just right.
    """
    best: Sizing[T] | None = None
    low, width = lower, STOP_HALVING * lower
    if upper == math.inf and lower > 0.0:
        # The answer is mostly just above the bound, and times of much smaller pools are costly to find: go up to it.
        while best is None and width < MOST_WIDENING * lower:
            best = sizing_at(pools, fit, lower + width)
            low, width = (low, width) if best is not None else (lower + width, 8.0 * width)
    near = best is None
    if best is None:
        best = sizing_at(pools, fit, upper)
    if best is None:
        return None
    low, width = min(low, best.period), STOP_HALVING * best.period
    while best.period > 0.0:
        below = math.nextafter(best.period, -math.inf)
        middle = below
        if near and low + width < best.period:
            middle = low + width
            width *= 8
        elif best.period - low > STOP_HALVING * best.period:
            middle = min(below, low + (best.period - low) / 2)
        found = sizing_at(pools, fit, middle)
        if found is not None:
            best, near = found, False
        elif middle == below:
            return best
        else:
            low = middle
    return best
