"""Periods that no placement can beat, from the stages alone.

Stage s runs on one pool, so the period is at least its least time on all devices. It occupies at least A_s = min n *
T_s(n) device-seconds of every period, and all stages together have N * period of them. Both bounds hold for every
order, sharing and staleness, and for the mean period of random durations when the tables hold lower bounds of mean
times (T_s is then a lower bound of a cycle's mean time; Baccelli et al. 1992).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.passes.search.options import StageTable


@dataclass(frozen=True, slots=True)
class Bound:
    """`slowest_stage` names the stage that gives the first bound."""

    seconds: float
    slowest_seconds: float
    slowest_stage: str
    area_seconds: float
    """All device-seconds of a period, divided by all devices."""


def lower_bound(tables: Mapping[str, Sequence[StageTable | None]], devices: Sequence[int]) -> Bound:
    """`tables[stage][type]`, None where the stage cannot run; `devices[type]` in all. Infinite when a stage fits
    nowhere.

    With several types a stage counts on its best one, which keeps both bounds valid.
    """
    slowest, name, area = 0.0, "", 0.0
    for stage, kinds in tables.items():
        times = [t.least_seconds(n) for t, n in zip(kinds, devices, strict=True) if t is not None]
        seconds = min(times, default=math.inf)
        if seconds > slowest or not name:
            slowest, name = seconds, stage
        area += min((t.least_area() for t in kinds if t is not None), default=math.inf)
    total = sum(devices)
    spread = area / total if total else math.inf
    return Bound(max(slowest, spread), slowest, name, spread)


def gap(period: float, bound: float) -> float:
    """How far `period` may be above the best there is, as a fraction: period / bound - 1, at least 0."""
    if bound <= 0.0:
        return 0.0 if period <= 0.0 else math.inf
    return max(0.0, period / bound - 1.0)
