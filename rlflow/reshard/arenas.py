"""Arenas: one stretch of memory per device that holds its source shards before and its target shards after."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from rlflow.reshard.boxes import Box, Shape, address_span, extents, runs, volume
from rlflow.reshard.intervals import Intervals, normalise
from rlflow.reshard.plan import ReshardPlan
from rlflow.reshard.shards import Sharding
from rlflow.values import dataclass

EXACT_RUNS = 256
"""Runs up to which the bytes of a strided box are listed exactly; above, the span from first to last stands in."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a local tensor starts, in bytes, and its shape."""

    start: int
    shape: Shape


class Side:
    """The local tensors of one side, laid one after another from byte 0 of every device's arena, in catalogue order."""

    def __init__(self, sharding: Sharding, devices: tuple[int, ...]) -> None:
        self.sharding = sharding
        self.element_bytes = sharding.storage.element_bytes
        self.rank_of = {device: rank for rank, device in enumerate(devices)}
        self.places: dict[int, dict[str, Place]] = {}
        self.size: dict[int, int] = {}
        """Bytes by device."""
        for device, rank in self.rank_of.items():
            places, start = {}, 0
            for name, local in sharding.local_tensors(rank).items():
                shape = sharding.local_shape(rank, local)
                places[name] = Place(start, shape)
                start += prod(shape) * self.element_bytes
            self.places[device], self.size[device] = places, start

    def cells(self, device: int, tensor: str, box: Box) -> Iterator[tuple[Box, Box, Place]]:
        """(canonical box, local box, place of its tensor) that tile a box which the device holds."""
        place = self.places[device][self.sharding.local(tensor)[0].name]
        for piece in self.sharding.pieces(self.rank_of[device], tensor):
            for canonical, local in piece.locate(box):
                yield canonical, local, place

    def bytes_of(self, device: int, tensor: str, box: Box) -> Intervals:
        """The bytes of a box, or, where they are too scattered, intervals that contain them."""
        found = []
        for _, local, place in self.cells(device, tensor, box):
            if _run_count(local, place.shape) <= EXACT_RUNS:
                spans = [(offset, offset + volume(run)) for run, offset in runs(local, place.shape)]
            else:
                spans = [address_span(local, place.shape)]
            size = self.element_bytes
            found += [(place.start + low * size, place.start + high * size) for low, high in spans]
        return normalise(found)


def sides(plan: ReshardPlan) -> tuple[Side, Side]:
    """Source and target."""
    return (
        Side(Sharding(plan.catalogue, plan.source.layout, plan.source.storage), plan.source.devices),
        Side(Sharding(plan.catalogue, plan.target.layout, plan.target.storage), plan.target.devices),
    )


def same_memory(before: Side, after: Side, device: int, tensor: str, box: Box) -> bool:
    """Whether every element of a box has the same address before and after, so that keeping it is no work."""
    if before.element_bytes != after.element_bytes or before.sharding.storage.dtype != after.sharding.storage.dtype:
        return False
    old, old_local, old_place = next(before.cells(device, tensor, box))
    new, new_local, new_place = next(after.cells(device, tensor, box))
    if old != box or new != box:  # it lies in several pieces
        return False
    if _run_count(old_local, old_place.shape) != _run_count(new_local, new_place.shape):
        return False
    size = before.element_bytes
    return all(
        old_place.start + a * size == new_place.start + b * size and extents(run) == extents(other)
        for (run, a), (other, b) in zip(runs(old_local, old_place.shape), runs(new_local, new_place.shape), strict=True)
    )


def _run_count(box: Box, shape: Shape) -> int:
    inner = len(shape)
    while inner > 0 and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    return prod(high - low for low, high in box[: max(inner - 1, 0)])
