"""What one stage can run as: options, and the Pareto set of them as a function of the devices at hand.

The table is the envelope of a stage. With n devices every option that needs at most n is open (the others stay idle),
so the least time T_s(n) never increases with n.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class StageOption:
    """One way to run a stage. Times are per period of the flow; bytes are of the fullest device.

    ValueError for a time that is negative or not finite, for no devices, and for static bytes above the peak.
    """

    devices: int
    seconds: float
    static_bytes: int
    """Held while other stages of the pool run (0 when all is offloaded between the stage's runs)."""
    peak_bytes: int
    """Held while the stage runs, the static bytes included."""
    layout: Hashable
    """What the caller wants back when this option is chosen."""
    layout_class: Hashable
    """Options of one class are re-laid-out to and from at equal cost."""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"an option needs at least one device, not {self.devices}")
        if not 0.0 <= self.seconds < math.inf:
            raise ValueError(f"seconds of an option must be finite and not negative, not {self.seconds}")
        if not 0 <= self.static_bytes <= self.peak_bytes:
            raise ValueError(f"static bytes {self.static_bytes} must lie between 0 and the peak {self.peak_bytes}")


COSTS = attrgetter("seconds", "static_bytes", "peak_bytes")
"""Sort key of options: the fastest first, then the one with the fewest bytes."""

_ORDER = attrgetter("devices", "seconds", "static_bytes", "peak_bytes")


def dominates(a: StageOption, b: StageOption) -> bool:
    """Whether `a` is nowhere worse than `b` in time and bytes (devices and class are the caller's to compare)."""
    return a.seconds <= b.seconds and a.static_bytes <= b.static_bytes and a.peak_bytes <= b.peak_bytes


@dataclass(frozen=True, slots=True)
class ClassTable:
    """The options of one layout class: `frontiers[i]` is the Pareto set that at most `devices[i]` devices allow."""

    layout_class: Hashable
    devices: tuple[int, ...]
    frontiers: tuple[tuple[StageOption, ...], ...]
    """Each in order of time, then bytes."""

    def at(self, devices: int) -> tuple[StageOption, ...]:
        index = bisect_right(self.devices, devices)
        return self.frontiers[index - 1] if index else ()


@dataclass(frozen=True, slots=True)
class StageTable:
    """All options of a stage on one device type that no other option makes pointless.

    An option is dropped when one of its class needs no more devices, no more time and no more bytes.
    """

    classes: tuple[ClassTable, ...]
    limit_bytes: int
    """Memory of a device; options whose peak exceeds it are not in `classes`."""
    too_large: tuple[StageOption, ...] = ()
    """Of the options above the limit those with a smaller peak than any with fewer devices: to say why nothing fits."""
    given: tuple[StageOption, ...] = field(default=(), repr=False)
    """Everything the table was made from, in order of devices, then time."""

    @classmethod
    def of(cls, options: Iterable[StageOption], limit_bytes: int) -> StageTable:
        """Options in any order. Equal ones are kept once: the first."""
        given = tuple(sorted(options, key=_ORDER))
        building: dict[Hashable, tuple[list[int], list[tuple[StageOption, ...]]]] = {}
        too_large: list[StageOption] = []
        for option in given:
            if option.peak_bytes > limit_bytes:
                if not too_large or option.peak_bytes < too_large[-1].peak_bytes:
                    too_large.append(option)
                continue
            devices, frontiers = building.setdefault(option.layout_class, ([], []))
            kept = frontiers[-1] if frontiers else ()
            if any(dominates(other, option) for other in kept):
                continue
            frontier = [other for other in kept if not dominates(option, other)]
            frontier.append(option)
            frontier.sort(key=COSTS)
            if devices and devices[-1] == option.devices:
                frontiers[-1] = tuple(frontier)
            else:
                devices.append(option.devices)
                frontiers.append(tuple(frontier))
        classes = tuple(ClassTable(name, tuple(d), tuple(f)) for name, (d, f) in building.items())
        return cls(classes, limit_bytes, tuple(too_large), given)

    def options(self, devices: int) -> tuple[StageOption, ...]:
        """The Pareto set of every class, with at most so many devices."""
        return tuple(option for table in self.classes for option in table.at(devices))

    def least_seconds(self, devices: int) -> float:
        """T_s(devices); infinite where nothing fits. Never increases with the devices."""
        return min((f[0].seconds for table in self.classes if (f := table.at(devices))), default=math.inf)

    def envelope(self, sizes: Sequence[int]) -> list[float]:
        """`least_seconds` of every size; `sizes` in increasing order."""
        found = [math.inf] * len(sizes)
        for table in self.classes:
            index, last = 0, len(table.devices)
            best = math.inf
            for position, size in enumerate(sizes):
                while index < last and table.devices[index] <= size:
                    best = table.frontiers[index][0].seconds
                    index += 1
                if best < found[position]:
                    found[position] = best
        return found

    def least_area(self) -> float:
        """A_s = min n * T_s(n), in device-seconds: what one period of the stage occupies at the least."""
        return min((o.devices * o.seconds for t in self.classes for f in t.frontiers for o in f), default=math.inf)

    def without_class(self, layout_class: Hashable) -> StageTable:
        """The table with one layout class forbidden."""
        return replace(
            self,
            classes=tuple(table for table in self.classes if table.layout_class != layout_class),
            too_large=tuple(option for option in self.too_large if option.layout_class != layout_class),
            given=tuple(option for option in self.given if option.layout_class != layout_class),
        )

    def where(self, legal: Callable[[StageOption], bool]) -> StageTable:
        """The table of the options that a pin allows."""
        return StageTable.of((option for option in self.given if legal(option)), self.limit_bytes)
