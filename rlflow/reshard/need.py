"""Need and Have: what devices must hold after a reshard, and what they have of it before."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlflow.reshard.atoms import AtomClass
from rlflow.values import dataclass


def on_devices(classes: Iterable[AtomClass], source: tuple[int, ...], target: tuple[int, ...]) -> tuple[AtomClass, ...]:
    """Classes of ranks as classes of devices: `source[rank]` and `target[rank]` are devices."""
    return tuple(
        AtomClass(
            tuple(sorted(source[rank] for rank in found.holders)),
            tuple(sorted(target[rank] for rank in found.needers)),
            found.parts,
        )
        for found in classes
    )


def missing(found: AtomClass) -> tuple[int, ...]:
    """Devices that need a class and do not hold it."""
    holders = set(found.holders)
    return tuple(device for device in found.needers if device not in holders)


def kept(found: AtomClass) -> tuple[int, ...]:
    """Devices that need a class and hold it already."""
    holders = set(found.holders)
    return tuple(device for device in found.needers if device in holders)


@dataclass(frozen=True, slots=True)
class Volumes:
    """Elements per device, by device number; devices with none are left out."""

    need: dict[int, int]
    kept: dict[int, int]
    """Of the needed: what is there already."""
    missing: dict[int, int]
    """Need without Have: what has to come from elsewhere."""


def volumes(classes: Iterable[AtomClass]) -> Volumes:
    """Over classes of devices. Padding is in none of the numbers."""
    classes = list(classes)
    return Volumes(_sum(classes, lambda found: found.needers), _sum(classes, kept), _sum(classes, missing))


def _sum(classes: list[AtomClass], devices: Callable[[AtomClass], tuple[int, ...]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for found in classes:
        elements = found.elements
        for device in devices(found):
            total[device] = total.get(device, 0) + elements
    return dict(sorted(total.items()))
