"""Which pages a queue moves beside which phase, and which must move between phases.

One direction at a time. Copies out run as early as they can: they queue when their gap starts. Copies in run as late as
they can, which is the same queue with time reversed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from rlflow.values import dataclass

Page = tuple[int, int, int]
"""(number of the eviction, page number, bytes)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One phase as the queue sees it: what arrives at its start, and how much may wait."""

    arrivals: tuple[Page, ...]
    start_limit: int
    """Bytes that may still wait when the phase starts."""
    end_limit: int
    """Bytes that may still wait when it ends."""
    window_bytes: int
    """Bytes the link can move beside the phase."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The outcome at one phase, with the bytes still waiting at its start and end."""

    before: tuple[Page, ...]
    during: tuple[Page, ...]
    start_bytes: int
    end_bytes: int


def spread(steps: Sequence[Step], *, cyclic: bool) -> list[Moved]:
    """First in, first out through all phases. Cyclic: the steady state, in which a period ends as it began.

    A limit below what the arrivals can reach is met by moving pages between phases. On a line, what still waits after
    the last phase is dropped from the result: it never had to move.
    """
    waiting: list[Page] = []
    for _ in range(2 * len(steps) + 2):
        moved, left = _round(steps, waiting)
        if not cyclic or left == waiting:
            return moved
        waiting = left
    # The queue drifts from period to period. Emptying it once a period gives a steady state for sure.
    drained = _round(steps, [])
    first = drained[0][0]
    return [Moved((*drained[1], *first.before), first.during, first.start_bytes, first.end_bytes), *drained[0][1:]]


def _round(steps: Sequence[Step], waiting: list[Page]) -> tuple[list[Moved], list[Page]]:
    moved = []
    for step in steps:
        queue = [*waiting, *step.arrivals]
        sums = [0, *accumulate(size for _, _, size in queue)]
        total = sums[-1]

        def after(before: int, sums: list[int] = sums, step: Step = step) -> int:
            """Position reached in the queue at the end of the phase, if `before` pages moved ahead of it."""
            return bisect_right(sums, sums[before] + step.window_bytes) - 1

        low, high = 0, len(queue)
        while low < high:  # fewest pages between phases that keep both limits; more pages never hurt
            middle = (low + high) // 2
            if total - sums[middle] <= step.start_limit and total - sums[after(middle)] <= step.end_limit:
                high = middle
            else:
                low = middle + 1
        end = after(low)
        moved.append(Moved(tuple(queue[:low]), tuple(queue[low:end]), total - sums[low], total - sums[end]))
        waiting = queue[end:]
    return moved, waiting
