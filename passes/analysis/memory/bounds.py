"""What no plan can avoid: lower bounds that do not look at the plan."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rlflow.passes.analysis.memory.gaps import Gap, all_gaps
from rlflow.passes.analysis.memory.objects import Device, Period, Resident
from rlflow.passes.analysis.memory.program import overflow
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Per period: bytes each way, seconds of link and rebuilding, exposed seconds."""

    offload_bytes: int
    onload_bytes: int
    busy_seconds: float
    exposed_seconds: Fraction


def lower_bounds(residents: Sequence[Resident], period: Period, device: Device, busy_seconds: float) -> Bounds:
    """In a phase that overflows, so many bytes are absent. What cannot go without a copy must leave in the phases
    before it that its gaps span, and come back in those after it; what these windows cannot hide is exposed."""
    gaps = all_gaps(residents, period)
    offload = onload = 0
    exposed = Fraction(0)
    for phase, over in enumerate(overflow(residents, period, device)):
        if over <= 0:
            continue
        here = [gap for gap in gaps if phase in gap.phases]
        saving, returning = [g for g in here if g.saves], [g for g in here if g.returns]
        out = max(0, over - sum(g.resident.bytes for g in here if not g.saves))
        back = max(0, over - sum(g.resident.bytes for g in here if not g.returns))
        offload, onload = max(offload, out), max(onload, back)
        lead = max((_window(_before(gap, phase), period) for gap in saving), default=Fraction(0))
        lag = max((_window(_after(gap, phase), period) for gap in returning), default=Fraction(0))
        exposed = max(exposed, Fraction(out, device.d2h) - lead, Fraction(back, device.h2d) - lag)
    return Bounds(offload, onload, busy_seconds, exposed)


def _before(gap: Gap, phase: int) -> tuple[int, ...]:
    return gap.phases[: gap.phases.index(phase)]


def _after(gap: Gap, phase: int) -> tuple[int, ...]:
    return gap.phases[gap.phases.index(phase) + 1 :]


def _window(phases: Sequence[int], period: Period) -> Fraction:
    return sum((period.phases[phase].window for phase in phases), Fraction(0))
