"""What lives in device memory, the phases of a period, and the device with its link to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from fractions import Fraction
from functools import cached_property

from rlflow.values import dataclass

DEFAULT_PAGE_BYTES = 64 * 2**20
"""What one copy moves where nothing else is said: long enough for full link speed, short enough to overlap."""


def exact_seconds(seconds: float | Fraction) -> Fraction:
    """Seconds as an exact number, rounded to the nanosecond, so that sums and comparisons have no rounding."""
    return Fraction(seconds).limit_denominator(10**9)


class Kind(Enum):
    """What leaving the device costs."""

    CLEAN = "clean"
    """The host copy stays valid (frozen weights): one copy back."""
    DIRTY = "dirty"
    """Written while it is needed (optimizer states): a copy out and a copy back."""
    DROPPABLE = "droppable"
    """Its content is not kept (gradients, KV pool, activations): no copy, rebuilt in `rebuild_seconds`."""


@dataclass(frozen=True, slots=True)
class Resident:
    """One object in device memory: so many bytes on every device of a pool, needed in the phases named.

    `page_bytes` is the least amount that moves on its own; the last page may be shorter. Where it equals `bytes`, the
    object moves whole or not at all. `host_copy` says of a clean object that the host holds it already; it then takes
    host memory all the time. `tag` is carried along for whoever reports on the object, such as a place in a source.

    `overwritten_in` is a phase that copies a dirty object to the host and then writes another over it: needed there, it
    is away afterwards. `written_in` is the phase in which a droppable object is written over another, of which it takes
    the memory: away until then, it is there right afterwards.
    """

    name: str
    owner: str
    bytes: int
    needed: frozenset[str]
    kind: Kind
    rebuild_seconds: Fraction = Fraction(0)
    host_copy: bool = False
    page_bytes: int = DEFAULT_PAGE_BYTES
    tag: str = ""
    overwritten_in: str = ""
    written_in: str = ""

    @property
    def full_pages(self) -> int:
        return self.bytes // self.page_bytes

    @property
    def tail_bytes(self) -> int:
        """Bytes of the last, shorter page; 0 where the pages divide the object."""
        return self.bytes % self.page_bytes

    def whole(self) -> Resident:
        """The same object as one page: all or nothing."""
        return replace(self, page_bytes=max(1, self.bytes))


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the period in which what is needed does not change. `overlap`: copies may run beside it."""

    name: str
    seconds: Fraction
    overlap: bool = True

    @property
    def window(self) -> Fraction:
        """Seconds in which copies hide behind the phase."""
        return self.seconds if self.overlap else Fraction(0)


@dataclass(frozen=True, slots=True)
class Period:
    """Phases in their static order. Cyclic: the first follows the last, for ever (the steady state of training)."""

    phases: tuple[Phase, ...]
    cyclic: bool = True

    @property
    def seconds(self) -> Fraction:
        return sum((phase.seconds for phase in self.phases), Fraction(0))

    def index(self, name: str) -> int:
        """Position of a phase; KeyError for an unknown name."""
        for position, phase in enumerate(self.phases):
            if phase.name == name:
                return position
        raise KeyError(name)


@dataclass(frozen=True)
class Device:
    """Memory of one device, its share of the host's, and the link between them in bytes/s, one rate per direction.

    `sharers` devices that copy at once divide `shared_bytes_per_s` of the host's side (a switch, a socket), in each
    direction: the rate that counts is the smaller of that share and the device's own.
    """

    hbm_bytes: int
    host_bytes: int
    d2h_bytes_per_s: int
    h2d_bytes_per_s: int
    shared_bytes_per_s: int | None = None
    sharers: int = 1

    def __post_init__(self) -> None:
        if self.hbm_bytes < 0 or self.host_bytes < 0:
            raise ValueError("memory of a device is not negative")
        if self.sharers < 1 or min(self.d2h, self.h2d) < 1:
            raise ValueError("every device needs at least 1 byte/s of the link in both directions")

    @cached_property
    def d2h(self) -> int:
        """Bytes/s from device to host when all sharers copy."""
        return self._share(self.d2h_bytes_per_s)

    @cached_property
    def h2d(self) -> int:
        """Bytes/s from host to device when all sharers copy."""
        return self._share(self.h2d_bytes_per_s)

    def _share(self, own: int) -> int:
        return own if self.shared_bytes_per_s is None else min(own, self.shared_bytes_per_s // self.sharers)


def check_inputs(residents: Sequence[Resident], period: Period) -> None:
    """ValueError for what no caller may hand over: names used twice, unknown phases, sizes or times below zero."""
    names = [phase.name for phase in period.phases]
    if not names:
        raise ValueError("a period has at least one phase")
    for kind, listed in (("phase", names), ("resident", [resident.name for resident in residents])):
        twice = sorted({name for name in listed if listed.count(name) > 1})
        if twice:
            raise ValueError(f"{kind} named twice: {', '.join(twice)}")
    if any(phase.seconds < 0 for phase in period.phases):
        raise ValueError("a phase lasts at least 0 s")
    for resident in residents:
        unknown = sorted(resident.needed.difference(names))
        if unknown:
            raise ValueError(f"{resident.name} is needed in unknown phases: {', '.join(unknown)}")
        if resident.bytes < 0 or resident.page_bytes < 1 or resident.rebuild_seconds < 0:
            raise ValueError(f"{resident.name}: bytes and seconds are not negative, a page has at least 1 byte")
        if resident.host_copy and resident.kind is not Kind.CLEAN:
            raise ValueError(f"{resident.name}: only a clean object has a host copy that stays valid")
        if resident.rebuild_seconds and resident.kind is not Kind.DROPPABLE:
            raise ValueError(f"{resident.name}: only a droppable object is rebuilt")
        if resident.overwritten_in and (
            resident.kind is not Kind.DIRTY or resident.overwritten_in not in resident.needed or not period.cyclic
        ):
            raise ValueError(
                f"{resident.name}: only a dirty object of a cyclic period is overwritten, where it is needed"
            )
        if resident.written_in and (resident.kind is not Kind.DROPPABLE or resident.written_in in resident.needed):
            raise ValueError(f"{resident.name}: only a droppable object is written over another, and needed after that")
