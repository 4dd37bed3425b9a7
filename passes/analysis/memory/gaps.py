"""Gaps: the maximal runs of phases in which an object is not needed, and what leaving in one costs.

Liveness on a fixed phase order. In a cyclic period a gap may wrap round the end, which makes the matrix of gaps and
phases circular-ones instead of interval (Bartholdi, Orlin, Ratliff 1980).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rlflow.passes.analysis.memory.objects import Device, Kind, Period, Resident
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Gap:
    """One gap of a resident. `phases` are positions in the period, in order; they may wrap.

    `forced`: its memory is another's in some phase of it, so that it is gone in all of them. `overwritten`: by the
    phase before the gap, which has copied it to the host. `taken_over`: it comes back by taking over such memory.

    `saves`: bytes leave by a copy to the host in every period. `saves_once`: only bytes that the host does not hold
    yet (clean objects on a line). `returns`: bytes come back by a copy. `rebuilds`: they come back by rebuilding.
    `always`: a cyclic period never needs the object, so that it leaves once, before the first period.
    """

    resident: Resident
    phases: tuple[int, ...]
    saves: bool
    saves_once: bool
    returns: bool
    rebuilds: bool
    always: bool = False
    overwritten: bool = False
    taken_over: bool = False

    @property
    def forced(self) -> bool:
        return self.overwritten or self.taken_over

    @property
    def first(self) -> int:
        return self.phases[0]

    @property
    def last(self) -> int:
        return self.phases[-1]

    def seconds(self, count: int, device: Device) -> Fraction:
        """Seconds of link or rebuilding for `count` bytes absent in this gap, without a first host copy."""
        total = Fraction(0)
        if self.saves:
            total += Fraction(count, device.d2h)
        if self.returns:
            total += Fraction(count, device.h2d)
        if self.rebuilds:
            total += self.resident.rebuild_seconds * Fraction(count, max(1, self.resident.bytes))
        return total

    @property
    def pools_host(self) -> bool:
        """Takes host memory from the start of the gap to its end (dirty objects)."""
        return self.resident.kind is Kind.DIRTY

    def host_phases(self, period: Period) -> frozenset[int]:
        """The phases in which a dirty object takes host memory: those of the gap, and one that overwrites it."""
        before = {(self.first - 1) % len(period.phases)} if self.overwritten else set()
        return frozenset(before.union(self.phases))

    @property
    def keeps_host(self) -> bool:
        """Makes a host copy that then stays for ever (clean objects that have none yet)."""
        return self.resident.kind is Kind.CLEAN and not self.resident.host_copy

    def label(self, period: Period) -> str:
        """`rollout..logp`, by the names of the first and last phase."""
        first, last = period.phases[self.first].name, period.phases[self.last].name
        return first if first == last else f"{first}..{last}"


def gaps_of(resident: Resident, period: Period) -> tuple[Gap, ...]:
    """All gaps of a resident, by first phase. Every gap that starts after a use pays for leaving, every gap that ends
    in a use for coming back. On a line, what is absent at the start was never on the device, and what is absent at the
    end does not return. An object of a cyclic period that no phase needs leaves once, before the first period."""
    needed = [phase.name in resident.needed for phase in period.phases]
    size = len(needed)
    if resident.bytes == 0:
        return ()
    if period.cyclic:
        if not any(needed):
            return (Gap(resident, tuple(range(size)), False, False, False, False, always=True),)
        starts = [i for i in range(size) if not needed[i] and needed[i - 1]]
    else:
        starts = [i for i in range(size) if not needed[i] and (i == 0 or needed[i - 1])]
    found = []
    for start in starts:
        phases = [start]
        while True:
            following = phases[-1] + 1
            if following == size and not period.cyclic:
                break
            following %= size
            if needed[following]:
                break
            phases.append(following)
        after_use = period.cyclic or start > 0
        before_use = period.cyclic or phases[-1] < size - 1
        kind = resident.kind
        overwritten = bool(resident.overwritten_in) and period.phases[start - 1].name == resident.overwritten_in
        found.append(
            Gap(
                resident,
                tuple(phases),
                saves=kind is Kind.DIRTY and after_use and not overwritten,
                saves_once=kind is Kind.CLEAN and not resident.host_copy and after_use and not period.cyclic,
                returns=kind is not Kind.DROPPABLE and before_use,
                rebuilds=kind is Kind.DROPPABLE and before_use,
                overwritten=overwritten,
                taken_over=bool(resident.written_in) and period.phases[phases[-1]].name == resident.written_in,
            )
        )
    return tuple(found)


def all_gaps(residents: Sequence[Resident], period: Period) -> tuple[Gap, ...]:
    """The gaps of all residents, in their order."""
    return tuple(gap for resident in residents for gap in gaps_of(resident, period))


@dataclass(frozen=True, slots=True)
class Eviction:
    """How much of an object is absent in one gap: full pages counted from the front, and the last, shorter one."""

    gap: Gap
    full_pages: int
    tail: bool = False

    @property
    def bytes(self) -> int:
        resident = self.gap.resident
        return self.full_pages * resident.page_bytes + (resident.tail_bytes if self.tail else 0)

    def pages(self) -> list[tuple[int, int]]:
        """(page number, bytes) of what is absent."""
        resident = self.gap.resident
        found = [(number, resident.page_bytes) for number in range(self.full_pages)]
        return [*found, (resident.full_pages, resident.tail_bytes)] if self.tail else found


def whole_gap(gap: Gap) -> Eviction:
    """All of the object, absent in the gap."""
    return Eviction(gap, gap.resident.full_pages, gap.resident.tail_bytes > 0)
