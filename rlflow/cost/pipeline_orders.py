"""Pipeline schedules as lists of work, and their time when ranks are not equal.

A rank works through its list in order; a pass starts when what it needs has arrived. That is exact for any times, and
takes time in proportion to p x m.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rlflow.cost.errors import CostError
from rlflow.cost.pipelines import check_schedule
from rlflow.values import dataclass

Kind = Literal["F", "B", "W"]


@dataclass(frozen=True, slots=True)
class Work:
    """One pass of a micro-batch through one virtual stage of a rank. B is the whole backward pass unless W follows."""

    kind: Kind
    microbatch: int
    chunk: int = 0


Order = tuple[tuple[Work, ...], ...]
"""What every rank does, in order."""

Seconds = Callable[[Kind, int, int], float]
"""Of a kind of work on a rank and chunk."""


def one_f_one_b(p: int, m: int) -> Order:
    """Warm up with p - 1 - rank forward passes, then alternate (PipeDream-Flush, Narayanan et al. 2021)."""
    return tuple(_alternate([Work("F", i) for i in range(m)], [Work("B", i) for i in range(m)], p - 1 - r)
                 for r in range(p))  # fmt: skip


def interleaved(p: int, m: int, v: int) -> Order:
    """Virtual stages in turn for every p micro-batches (Narayanan et al. 2021). LayoutError unless p divides m."""
    check_schedule("interleaved", p, m, v)

    def passes(kind: Kind) -> list[Work]:
        chunks = range(v) if kind == "F" else reversed(range(v))
        by_chunk = list(chunks)
        return [Work(kind, g + i, c) for g in range(0, m, p) for c in by_chunk for i in range(min(p, m - g))]

    forward, backward = passes("F"), passes("B")
    return tuple(_alternate(forward, backward, 2 * (p - 1 - r) + (v - 1) * p) for r in range(p))


def zero_bubble(p: int, m: int, *, doubled: bool = False) -> Order:
    """ZB-H1, or with `doubled` activations ZB-H2 (Qi et al. 2023); B makes the gradients of the inputs only.

    As 1F1B, with W of rank r behind its B by r micro-batches, so that no rank waits for the W of the next; every rank
    holds up to p. ZB-H2 warms up twice as long and keeps W twice as far behind: 2p - 1.
    """
    factor = 2 if doubled else 1
    orders = []
    for r in range(p):
        order: list[Work] = []
        for work in _alternate(
            [Work("F", i) for i in range(m)], [Work("B", i) for i in range(m)], factor * (p - 1 - r)
        ):
            order.append(work)
            if work.kind == "B" and work.microbatch >= factor * r:
                order.append(Work("W", work.microbatch - factor * r))
        late = min(m, factor * r)
        orders.append((*order, *(Work("W", i) for i in range(m - late, m))))
    return tuple(orders)


def _alternate(forward: list[Work], backward: list[Work], warm_up: int) -> tuple[Work, ...]:
    ahead = min(warm_up, len(forward))
    order = forward[:ahead]
    for f, b in zip(forward[ahead:], backward, strict=False):
        order += [f, b]
    return tuple(order + backward[len(forward) - ahead :])


def makespan(order: Order, seconds: Seconds, transfer: float = 0.0) -> float:
    """Seconds from the first start to the last end; `transfer` between neighbouring stages.

    Virtual stage c of rank r is part c x p + r of the model. CostError for an order that waits for itself.
    """
    p = len(order)
    parts = 1 + max(work.chunk * p + r for r, list_ in enumerate(order) for work in list_)
    ended: dict[tuple[Kind, int, int], float] = {}
    position, free = [0] * p, [0.0] * p
    moved = True
    while moved:
        moved = False
        for r, mine in enumerate(order):
            while position[r] < len(mine):
                work = mine[position[r]]
                arrived = _arrival(work, work.chunk * p + r, parts, ended, transfer)
                if arrived is None:
                    break
                start = max(free[r], arrived)
                free[r] = start + seconds(work.kind, r, work.chunk)
                ended[work.kind, work.microbatch, work.chunk * p + r] = free[r]
                position[r] += 1
                moved = True
    stuck = [r for r in range(p) if position[r] < len(order[r])]
    if stuck:
        raise CostError(
            f"the pipeline order waits for itself at rank {stuck[0]}: {order[stuck[0]][position[stuck[0]]]}"
        )
    return max(free)


def _arrival(
    work: Work, part: int, parts: int, ended: dict[tuple[Kind, int, int], float], transfer: float
) -> float | None:
    """When all that a pass needs is there; None = not known yet."""
    i = work.microbatch
    if work.kind == "W":
        return ended.get(("B", i, part))
    if work.kind == "F":
        if part == 0:
            return 0.0
        before = ended.get(("F", i, part - 1))
        return None if before is None else before + transfer
    own = ended.get(("F", i, part))
    if own is None or part == parts - 1:
        return own
    after = ended.get(("B", i, part + 1))
    return None if after is None else max(own, after + transfer)
