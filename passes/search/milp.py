"""The search for pools as a mixed-integer linear program: an oracle for the bisection, and a form for side conditions.

Binary x[P, d, n] = pool P runs on n devices of type d. Every stage is in one pool, the devices of a type suffice, and
the period is at least T_P(n) of every pool chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolColumn:
    """One variable: these stages on so many devices of a type."""

    stages: tuple[int, ...]
    kind: int
    devices: int
    seconds: float


def solve_milp(
    stages: int, columns: Sequence[PoolColumn], devices: Sequence[int]
) -> tuple[float, tuple[PoolColumn, ...]] | None:
    """The least period and the pools that reach it; None when there are none. `devices[type]` in all.

    Needs scipy (HiGHS). RuntimeError when the solver stops without an answer.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    count = len(columns)
    rows: list[int] = []
    places: list[int] = []
    values: list[float] = []

    def put(row: int, place: int, value: float) -> None:
        rows.append(row)
        places.append(place)
        values.append(value)

    for place, column in enumerate(columns):
        for stage in column.stages:
            put(stage, place, 1.0)
        put(stages + column.kind, place, column.devices)
        # One row per stage bounds the period by the only pool chosen that has it: tighter than a row per variable.
        for stage in column.stages:
            put(stages + len(devices) + stage, place, -column.seconds)
    for stage in range(stages):
        put(stages + len(devices) + stage, count, 1.0)
    shape = (2 * stages + len(devices), count + 1)
    matrix = coo_array((values, (rows, places)), shape=shape).tocsr()
    low = np.concatenate([np.ones(stages), np.full(len(devices), -np.inf), np.zeros(stages)])
    high = np.concatenate([np.ones(stages), np.asarray(devices, dtype=float), np.full(stages, np.inf)])
    cost = np.zeros(count + 1)
    cost[count] = 1.0
    found = milp(
        cost,
        constraints=LinearConstraint(matrix, low, high),
        integrality=np.append(np.ones(count), 0),
        bounds=Bounds(np.zeros(count + 1), np.append(np.ones(count), np.inf)),
        options={"mip_rel_gap": 0.0},
    )
    if found.status == 2:
        return None
    if found.x is None or found.status != 0:
        raise RuntimeError(f"the solver stopped: {found.message}")
    chosen = tuple(column for column, x in zip(columns, found.x, strict=False) if x > 0.5)
    return max((column.seconds for column in chosen), default=0.0), chosen
