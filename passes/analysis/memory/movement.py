"""When every page moves: chosen evictions laid out in time over one period.

Copies out start when their gap does; memory is free when a page has left. Copies in end when their gap does; a page
takes memory from the moment its copy starts. What fits beside a phase is hidden; the rest stands between phases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum
from fractions import Fraction
from itertools import groupby
from math import lcm

from rlflow.passes.analysis.memory.gaps import Eviction
from rlflow.passes.analysis.memory.objects import Device, Kind, Period, Resident
from rlflow.passes.analysis.memory.program import overflow
from rlflow.passes.analysis.memory.spread import Page, Step, spread
from rlflow.values import dataclass


class Action(Enum):
    OFFLOAD = "offload"
    ONLOAD = "onload"
    DROP = "drop"
    REBUILD = "rebuild"


@dataclass(frozen=True, slots=True)
class Move:
    """One action on pages of one size, back to back. `slot` 2i is the boundary before phase i, 2i + 1 the phase itself;
    in a cyclic period the boundary before phase 0 comes last, as slot 2 x phases."""

    action: Action
    eviction: int
    bytes: int
    page_bytes: int
    start: Fraction
    end: Fraction
    slot: int

    @property
    def seconds(self) -> Fraction:
        return self.end - self.start

    @property
    def exposed(self) -> bool:
        return self.slot % 2 == 0


@dataclass(frozen=True, slots=True)
class Slot:
    """A stretch of the stretched period: a phase, or the wait at the boundary before one."""

    number: int
    start: Fraction
    end: Fraction


@dataclass(frozen=True, slots=True)
class Movement:
    """All moves in the order of time, and the slots in which they happen. Times in seconds from the first phase."""

    moves: tuple[Move, ...]
    slots: tuple[Slot, ...]

    @property
    def exposed_seconds(self) -> Fraction:
        """What waiting at the boundaries adds to a period."""
        return sum((slot.end - slot.start for slot in self.slots if slot.number % 2 == 0), Fraction(0))


def lay_out(evictions: Sequence[Eviction], residents: Sequence[Resident], period: Period, device: Device) -> Movement:
    """The moves of one period. The evictions let every phase fit, and no page of them is there for nothing."""
    size = len(period.phases)
    out, without_copy = _leaving(evictions)
    slack = [-over for over in overflow(residents, period, device, evictions)]
    outs = spread(
        [
            Step(tuple(out[i]), slack[i], slack[i], int(phase.window * device.d2h))
            for i, phase in enumerate(period.phases)
        ],
        cyclic=period.cyclic,
    )
    back = [
        tuple(page for n, e in enumerate(evictions) if e.gap.returns and e.gap.last == i for page in _pages(n, e))
        for i in range(size)
    ]
    ins = spread(
        [
            Step(
                tuple(reversed(back[i])),
                slack[i] - outs[i].end_bytes,
                # On a line, what the first phase lacks began on the host: it has to come, whatever room there is.
                slack[i] - outs[i].start_bytes if i or period.cyclic else 0,
                int(period.phases[i].window * device.h2d),
            )
            for i in reversed(range(size))
        ],
        cyclic=period.cyclic,
    )[::-1]
    held = device.hbm_bytes - slack[0] + outs[0].start_bytes + ins[0].end_bytes
    clock = _Clock(evictions, period, device, held)
    clock.phase(0, outs[0].during, _in_order(ins[0].during))
    for i in [*range(1, size), *([0] if period.cyclic else [])]:
        # Time runs backwards for copies in: what moves `before` the phase ahead comes after it.
        clock.boundary(i, without_copy[i], outs[i].before, _in_order(ins[i - 1].before))
        if i:
            clock.phase(i, outs[i].during, _in_order(ins[i].during))
    return Movement(tuple(clock.moves), tuple(clock.slots))


def _pages(number: int, eviction: Eviction) -> list[Page]:
    return [(number, page, size) for page, size in eviction.pages()]


def _in_order(pages: Iterable[Page]) -> list[Page]:
    return list(pages)[::-1]


def _leaving(evictions: Sequence[Eviction]) -> tuple[dict[int, list[Page]], dict[int, list[Page]]]:
    """Pages that leave at the boundary before each phase: with a copy, and without."""
    copied: dict[int, list[Page]] = defaultdict(list)
    dropped: dict[int, list[Page]] = defaultdict(list)
    on_host: dict[str, set[int]] = {}
    for number, eviction in enumerate(evictions):
        gap = eviction.gap
        if gap.always:
            continue  # it left before the first period
        seen = on_host.setdefault(gap.resident.name, set())
        for page in _pages(number, eviction):
            copies = gap.saves or (gap.saves_once and page[1] not in seen)
            (copied if copies else dropped)[gap.first].append(page)
            if gap.resident.kind is Kind.CLEAN:
                seen.add(page[1])
    return copied, dropped


class _Clock:
    """Walks through the period and never lets a copy in start before its page has room. Time is counted in integer
    ticks, so many to a second that every page and every phase takes a whole number of them."""

    def __init__(self, evictions: Sequence[Eviction], period: Period, device: Device, held: int) -> None:
        self.evictions, self.period, self.device = evictions, period, device
        self.held = held
        rebuilding = [e.gap.seconds(e.bytes, device) for e in evictions if e.gap.rebuilds]
        lasting = [phase.seconds for phase in period.phases]
        self.rate = lcm(device.d2h, device.h2d, *(time.denominator for time in (*rebuilding, *lasting)))
        self.now = 0
        self.moves: list[Move] = []
        self.slots: list[Slot] = []
        self.late: list[Page] = []
        """Copies in that had no room beside their phase and go to the next boundary."""
        self.ended = 0
        """When the last copy so far ends."""

    def phase(self, number: int, outs: Sequence[Page], ins: Sequence[Page]) -> None:
        slot, start = 2 * number + 1, self.now
        end = start + self._ticks(self.period.phases[number].seconds)
        leaving = self._copy_out(slot, outs)
        latest = end - sum(size for *_, size in ins) * (self.rate // self.device.h2d)
        self.late = self._copy_in(slot, ins, leaving, max(latest, start), end)
        self._close(slot, start, end)

    def boundary(self, number: int, dropped: Sequence[Page], outs: Sequence[Page], ins: Sequence[Page]) -> None:
        slot, start = 2 * number or 2 * len(self.period.phases), self.now
        for pages in _alike(dropped):
            self._record(Action.DROP, slot, pages, start, start)
        self.held -= sum(size for *_, size in dropped)
        last = (number - 1) % len(self.period.phases)
        for n, eviction in enumerate(self.evictions):
            if eviction.gap.taken_over and eviction.gap.last == last:  # it lies where the others lay
                self._record(Action.REBUILD, slot, [(n, 0, eviction.bytes)], start, start)
                self.held += eviction.bytes
        assert self.held <= self.device.hbm_bytes, "what is written in place fits where it was written"
        leaving = self._copy_out(slot, outs)
        ins, self.late = [*self.late, *ins], []
        left = self._copy_in(slot, ins, leaving, start, None)
        assert not left, "everything has room once what leaves has left"
        end = max(start, self.ended)
        for n, eviction in enumerate(self.evictions):
            if eviction.gap.rebuilds and not eviction.gap.taken_over and eviction.gap.last == last:
                rebuilt = end + self._ticks(eviction.gap.seconds(eviction.bytes, self.device))
                self._record(Action.REBUILD, slot, [(n, 0, eviction.bytes)], end, rebuilt)
                self.held += eviction.bytes
                end = rebuilt
        assert self.held <= self.device.hbm_bytes, "a phase that fits begins with what it needs"
        self._close(slot, start, end)

    def _copy_out(self, slot: int, pages: Sequence[Page]) -> list[tuple[int, int]]:
        """(end, bytes) of copies back to back from now."""
        at, leaving = self.now, []
        each = self.rate // self.device.d2h
        for alike in _alike(pages):
            start = at
            for *_, size in alike:
                at += size * each
                leaving.append((at, size))
            self._record(Action.OFFLOAD, slot, alike, start, at)
        self.ended = at
        return leaving

    def _copy_in(
        self, slot: int, pages: Sequence[Page], leaving: Sequence[tuple[int, int]], at: int, limit: int | None
    ) -> list[Page]:
        """Copies from `at` on, each as soon as it has room; those that cannot end by `limit` are given back."""
        left = iter(leaving)
        coming = next(left, None)
        each = self.rate // self.device.h2d
        begun: list[Page] = []  # alike and back to back, from `start` to `end`
        start = end = at
        late: list[Page] = []
        for number, page in enumerate(pages):
            size = page[2]
            while coming is not None and (coming[0] <= at or self.held + size > self.device.hbm_bytes):
                at = max(at, coming[0])
                self.held -= coming[1]
                coming = next(left, None)
            if self.held + size > self.device.hbm_bytes or (limit is not None and at + size * each > limit):
                late = list(pages[number:])
                break
            if begun and (at != end or _like(begun[-1]) != _like(page)):
                self._record(Action.ONLOAD, slot, begun, start, end)
                begun = []
            if not begun:
                start = at
            begun.append(page)
            self.held += size
            at = end = at + size * each
        if begun:
            self._record(Action.ONLOAD, slot, begun, start, end)
            self.ended = max(self.ended, end)
        while coming is not None:
            self.held -= coming[1]
            coming = next(left, None)
        return late

    def _ticks(self, seconds: Fraction) -> int:
        return int(seconds * self.rate)

    def _record(self, action: Action, slot: int, pages: Sequence[Page], start: int, end: int) -> None:
        number, _, size = pages[0]
        times = Fraction(start, self.rate), Fraction(end, self.rate)
        self.moves.append(Move(action, number, size * len(pages), size, *times, slot))

    def _close(self, slot: int, start: int, end: int) -> None:
        self.slots.append(Slot(slot, Fraction(start, self.rate), Fraction(end, self.rate)))
        self.now = end


def _like(page: Page) -> tuple[int, int]:
    """Pages that are equal in this make one move: of one eviction, and of one size."""
    return page[0], page[2]


def _alike(pages: Sequence[Page]) -> list[list[Page]]:
    return [list(group) for _, group in groupby(pages, key=_like)]
