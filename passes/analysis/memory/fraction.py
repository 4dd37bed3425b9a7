"""The share of a device that an engine may take when others live on it too."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

from rlflow.passes.analysis.memory.movement import Movement
from rlflow.passes.analysis.memory.objects import Period, Resident
from rlflow.passes.analysis.memory.swap import SwapPlan
from rlflow.passes.analysis.memory.timeline import Sample, build_timeline


def memory_fraction(hbm_bytes: int, peak_of_others: int) -> Fraction:
    """(device - peak of others) / device, rounded down to 1/1000 so that what is printed is never too much; 0 if the
    others take all. ValueError for a device without memory."""
    if hbm_bytes < 1:
        raise ValueError("a device has at least 1 byte")
    free = max(0, hbm_bytes - peak_of_others)
    return Fraction(free * 1000 // hbm_bytes, 1000)


def peak_of_others(plan: SwapPlan, residents: Sequence[Resident], period: Period, mine: frozenset[str]) -> int:
    """The most bytes of objects outside `mine` at any time at which some of `mine` are on the device; 0 if never.

    An engine that never sleeps shares the device with the peak of training, one that sleeps does not.
    """
    others = _samples(plan, [resident for resident in residents if resident.name not in mine], period)
    own = _samples(plan, [resident for resident in residents if resident.name in mine], period)
    most = 0
    for at in sorted({sample.at for sample in (*others, *own)}):
        if _at(own, at):
            most = max(most, _at(others, at))
    return most


def _samples(plan: SwapPlan, residents: Sequence[Resident], period: Period) -> tuple[Sample, ...]:
    names = {resident.name for resident in residents}
    moves = tuple(m for m in plan.movement.moves if plan.evictions[m.eviction].gap.resident.name in names)
    return build_timeline(residents, plan.evictions, Movement(moves, plan.movement.slots), period).samples


def _at(samples: Sequence[Sample], at: Fraction) -> int:
    """Bytes at an instant. The first sample is at 0."""
    return samples[bisect_right(samples, at, key=lambda sample: sample.at) - 1].device_bytes
