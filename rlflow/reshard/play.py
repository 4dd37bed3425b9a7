"""An in-place order gone through step by step: its true peak, and its effect on real bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rlflow.reshard.arenas import Side, sides
from rlflow.reshard.boxes import Box, extents, relative, slices, volume
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.inplace import Act, InPlaceOrder
from rlflow.reshard.intervals import Interval, Intervals, intersection
from rlflow.reshard.plan import ReshardPlan, Transfer

if TYPE_CHECKING:
    from rlflow.reshard.execute import Array, Shards


class _Covered:
    """A growing union of intervals."""

    def __init__(self) -> None:
        self.lows: list[int] = []
        self.highs: list[int] = []

    def _range(self, low: int, high: int) -> tuple[int, int]:
        """Indices of the intervals that overlap or touch [low, high)."""
        return bisect_left(self.highs, low), bisect_left(self.lows, high + 1)

    def overlaps(self, intervals: Iterable[Interval]) -> bool:
        return any(
            max(low, self.lows[i]) < min(high, self.highs[i])
            for low, high in intervals
            for i in range(*self._range(low, high))
        )

    def add(self, intervals: Iterable[Interval]) -> None:
        for low, high in intervals:
            first, last = self._range(low, high)
            if first < last:
                low, high = min(low, self.lows[first]), max(high, self.highs[last - 1])
            self.lows[first:last], self.highs[first:last] = [low], [high]


def play(plan: ReshardPlan, order: InPlaceOrder) -> dict[int, int]:
    """The true peak of every device in bytes: the larger of its two layouts + what is staged at a time.

    ReshardError where a step reads what an earlier one has overwritten, moves onto itself, or unstages what is not
    staged.
    """
    before, after = sides(plan)
    devices = sorted(before.size.keys() | after.size.keys())
    arena = {device: max(before.size.get(device, 0), after.size.get(device, 0)) for device in devices}
    peak = dict(arena)
    overwritten = {device: _Covered() for device in devices}
    staged: dict[Transfer, int] = {}
    held = dict.fromkeys(devices, 0)
    for step in order.steps:
        move = step.transfer
        wanted: Intervals = ()
        if step.act is not Act.UNSTAGE and move.step == 0:
            wanted = before.bytes_of(move.source, move.tensor, move.box)
            if overwritten[move.source].overlaps(wanted):
                raise ReshardError(f"device {move.source}: {_named(move)} is overwritten before it is read")
        if step.act is Act.STAGE:
            staged[move] = volume(move.box) * before.element_bytes
            held[move.source] += staged[move]
            peak[move.source] = max(peak[move.source], arena[move.source] + held[move.source])
            continue
        if step.act is Act.UNSTAGE:
            if move not in staged:
                raise ReshardError(f"{_named(move)} is not staged")
            held[move.source] -= staged.pop(move)
        written = after.bytes_of(move.target, move.tensor, move.box)
        if step.act is Act.MOVE and move.step == 0 and move.source == move.target and intersection(wanted, written):
            raise ReshardError(f"device {move.source}: {_named(move)} overlaps itself and is not staged")
        overwritten[move.target].add(written)
    if staged:
        raise ReshardError(f"{_named(move)} stays in the staging buffer" for move in staged)
    return peak


def _named(move: Transfer) -> str:
    return f"{move.tensor} {[list(bounds) for bounds in move.box]}"


def execute_in_place(plan: ReshardPlan, order: InPlaceOrder, source: Mapping[int, Shards]) -> dict[int, Shards]:
    """Run an order on one byte array per device. Element types are those of the source arrays on both sides.

    ReshardError where the two sides' element sizes differ from that of the arrays.
    """
    import numpy as np

    before, after = sides(plan)
    kind = next(array.dtype for shards in source.values() for array in shards.values())
    if {before.element_bytes, after.element_bytes} != {kind.itemsize}:
        raise ReshardError(f"arrays of {kind} for {before.element_bytes} and {after.element_bytes} bytes per element")
    arenas = {device: np.zeros(size // kind.itemsize, kind) for device, size in order.arena_bytes.items()}
    for device, shards in source.items():
        for name, array in shards.items():
            _tensor(before, arenas[device], device, name)[...] = array
    staged: dict[Transfer, Array] = {}
    for step in order.steps:
        move = step.transfer
        if step.act is Act.UNSTAGE:
            value = staged.pop(move)
        else:
            value = _read(after if move.step else before, arenas[move.source], move.source, move.tensor, move.box)
        if step.act is Act.STAGE:
            staged[move] = value
            continue
        for canonical, local, _ in after.cells(move.target, move.tensor, move.box):
            name = after.sharding.local(move.tensor)[0].name
            array = _tensor(after, arenas[move.target], move.target, name)
            array[slices(local)] = value[slices(relative(canonical, move.box))].reshape(extents(local))
    return {
        device: {name: _tensor(after, arenas[device], device, name).copy() for name in places}
        for device, places in after.places.items()
    }


def _tensor(side: Side, arena: Array, device: int, name: str) -> Any:
    """A view of a local tensor in the arena."""
    place = side.places[device][name]
    start = place.start // side.element_bytes
    elements = 1
    for extent in place.shape:
        elements *= extent
    return arena[start : start + elements].reshape(place.shape)


def _read(side: Side, arena: Array, device: int, tensor: str, box: Box) -> Array:
    import numpy as np

    array = _tensor(side, arena, device, side.sharding.local(tensor)[0].name)
    value = np.empty(extents(box), arena.dtype)
    for canonical, local, _ in side.cells(device, tensor, box):
        value[slices(relative(canonical, box))] = array[slices(local)].reshape(extents(canonical))
    return value
