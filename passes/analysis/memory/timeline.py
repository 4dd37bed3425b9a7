"""Bytes on the device and on the host at every instant of a period, and what they are: data for tables and reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import lcm

from rlflow.passes.analysis.memory.gaps import Eviction
from rlflow.passes.analysis.memory.host import kept_copies, standing_copies
from rlflow.passes.analysis.memory.movement import Action, Move, Movement
from rlflow.passes.analysis.memory.objects import Period, Resident
from rlflow.values import dataclass

Contents = tuple[tuple[str, int], ...]
"""(object, bytes), largest first, without objects of 0 bytes."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes on the device in a stretch of time, when, and which objects they are."""

    where: str
    at: Fraction
    bytes: int
    contents: Contents


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes from an instant on, until the next sample."""

    at: Fraction
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A phase, or the wait at the boundary before one (`waiting`), with its peak."""

    phase: str
    waiting: bool
    start: Fraction
    end: Fraction
    peak: Peak
    host_bytes: int
    """The most on the host in the stretch."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One period. A page that leaves counts until its copy ends, one that comes counts from the start of its copy."""

    samples: tuple[Sample, ...]
    stretches: tuple[Stretch, ...]

    @property
    def peak(self) -> Peak:
        """The first of the greatest peaks."""
        return max((stretch.peak for stretch in self.stretches), key=lambda peak: peak.bytes)

    @property
    def host_peak(self) -> int:
        return max(stretch.host_bytes for stretch in self.stretches)

    def phase(self, name: str) -> Stretch:
        """The stretch of a phase itself; KeyError for an unknown name."""
        for stretch in self.stretches:
            if stretch.phase == name and not stretch.waiting:
                return stretch
        raise KeyError(name)

    def table(self) -> list[tuple[str, float, float, int, int]]:
        """(stretch, start in s, end in s, peak bytes, host bytes), for phases and for waits that take time."""
        return [
            (f"before {s.phase}" if s.waiting else s.phase, float(s.start), float(s.end), s.peak.bytes, s.host_bytes)
            for s in self.stretches
            if not s.waiting or s.end > s.start
        ]


@dataclass(frozen=True, slots=True)
class _Change:
    """A page that leaves or comes. `at` in ticks."""

    slot: int
    at: int
    device: int
    host: int
    name: str

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Within a slot by time; what leaves goes before what comes."""
        return self.slot, self.at, self.device, self.host


def build_timeline(
    residents: Sequence[Resident], evictions: Sequence[Eviction], movement: Movement, period: Period
) -> Timeline:
    """The timeline of a movement. Without moves, everything is resident all the time."""
    rate = _ticks_per_s(movement)
    changes = [c for m in movement.moves for c in _changes(m, evictions, rate)]
    changes += [_saved(eviction, movement, period, rate) for eviction in evictions if eviction.gap.overwritten]
    changes.sort(key=lambda c: c.order)
    by_name: dict[str, list[_Change]] = {}
    for change in changes:
        by_name.setdefault(change.name, []).append(change)
    device = {resident.name: resident.bytes for resident in residents}
    host = dict.fromkeys(device, 0)
    for resident in residents:
        anchor, missing, out = _anchor(resident, evictions, period)
        before = [change for change in by_name.get(resident.name, ()) if change.slot < anchor]
        device[resident.name] -= missing + sum(change.device for change in before)
        host[resident.name] = out - sum(change.host for change in before)
    constant = standing_copies(residents) + sum(kept_copies(evictions).values())

    on_device, on_host = sum(device.values()), constant + sum(host.values())
    samples = [Sample(Fraction(0), on_device, on_host)]
    stretches = []
    position = 0
    for slot in movement.slots:
        phase = period.phases[slot.number // 2 % len(period.phases)].name
        most, at, host_most = on_device, slot.start, on_host
        contents = dict(device)
        while position < len(changes) and changes[position].slot == slot.number:
            change = changes[position]
            position += 1
            device[change.name] += change.device
            on_device += change.device
            on_host += change.host
            host_most = max(host_most, on_host)
            if on_device > most:
                most, at, contents = on_device, Fraction(change.at, rate), dict(device)
            following = changes[position] if position < len(changes) else None
            if following is None or (following.slot, following.at) != (change.slot, change.at):
                samples.append(Sample(Fraction(change.at, rate), on_device, on_host))
        peak = Peak(phase, at, most, contents_of(contents))
        stretches.append(Stretch(phase, slot.number % 2 == 0, slot.start, slot.end, peak, host_most))
    return Timeline(tuple(samples), tuple(stretches))


def contents_of(sizes: dict[str, int]) -> Contents:
    """Sizes as contents."""
    return tuple(sorted(((n, b) for n, b in sizes.items() if b), key=lambda item: (-item[1], item[0])))


def _anchor(resident: Resident, evictions: Sequence[Eviction], period: Period) -> tuple[int, int, int]:
    """A slot at whose start the state is known: (slot, bytes missing on the device, bytes of the pool on the host)."""
    for number, phase in enumerate(period.phases):
        if phase.name in resident.needed:
            return 2 * number + 1, 0, 0
    mine = [eviction for eviction in evictions if eviction.gap.resident.name == resident.name]
    missing = sum(eviction.bytes for eviction in mine)
    return 0, missing, sum(eviction.bytes for eviction in mine if eviction.gap.pools_host)


def _ticks_per_s(movement: Movement) -> int:
    """So many ticks that every page and every slot starts and ends on one."""
    moves = movement.moves
    each = (move.seconds * move.page_bytes / move.bytes for move in moves)
    starts = [*(move.start.denominator for move in moves), *(slot.start.denominator for slot in movement.slots)]
    return lcm(*starts, *(time.denominator for time in each))


def _saved(eviction: Eviction, movement: Movement, period: Period, rate: int) -> _Change:
    """The host's copy of what a phase overwrites: it takes memory from the start of that phase."""
    number = 2 * ((eviction.gap.first - 1) % len(period.phases)) + 1
    start = next(slot.start for slot in movement.slots if slot.number == number)
    return _Change(number, int(start * rate), 0, eviction.bytes, eviction.gap.resident.name)


def _changes(move: Move, evictions: Sequence[Eviction], rate: int) -> Iterator[_Change]:
    """What a move does to both memories, page by page."""
    gap = evictions[move.eviction].gap
    name, slot = gap.resident.name, move.slot
    start = int(move.start * rate)
    if move.action is Action.DROP:
        yield _Change(slot, start, -move.bytes, 0, name)
    elif move.action is Action.REBUILD:
        yield _Change(slot, start, move.bytes, 0, name)
    else:
        size = move.page_bytes
        each = int(move.seconds * rate) * size // move.bytes
        pooled = size if gap.pools_host else 0
        for at in range(start, start + each * (move.bytes // size), each):
            if move.action is Action.OFFLOAD:
                yield _Change(slot, at, 0, pooled, name)
                yield _Change(slot, at + each, -size, 0, name)
            else:
                yield _Change(slot, at, size, 0, name)
                yield _Change(slot, at + each, 0, -pooled, name)
