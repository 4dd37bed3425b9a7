"""Buckets: the transfers of a plan in rounds, so that no device receives more than a buffer holds in any of them.

A unit is a local tensor of the target: what is fused stays in one round. Rounds draw on all pipeline stages at once, or
most links would idle; within a stage the order is that of the layers, so that loading can follow.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from rlflow.reshard.boxes import rows, take_rows, volume, with_rows_below
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.need import missing
from rlflow.reshard.plan import ReshardPlan, Transfer
from rlflow.reshard.shards import Sharding
from rlflow.reshard.shares import row_range
from rlflow.values import dataclass

if TYPE_CHECKING:
    import numpy as np

    Vector = np.ndarray[Any, np.dtype[np.int64]]
    """Elements received, by position of the device in the target."""

Oversized = Literal["split", "grow", "error"]


@dataclass(frozen=True, slots=True)
class Unit:
    """Part `piece` of `pieces` of a local tensor of the target; every box of it is cut at rows."""

    local_tensor: str
    tensors: tuple[str, ...]
    """Its canonical tensors."""
    piece: int = 0
    pieces: int = 1
    most_elements: int = 0
    """Rows of a split unit that are larger are cut along a further dimension."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """`rounds` of units. Sizes are bytes on the wire, per device."""

    rounds: tuple[tuple[Unit, ...], ...]
    buffers: int
    """2 where one is filled while the other is emptied."""
    buffer_bytes: int
    asked_bytes: int
    """The cap that was asked for, over all buffers."""
    largest_bytes: int
    """The most that a device receives in one round."""
    least_rounds: int
    """No plan under the cap has fewer: the largest receiver's bytes / cap, rounded up."""

    @property
    def capacity_bytes(self) -> int:
        """Of all buffers of a device; above the cap only where it was grown."""
        return self.buffers * self.buffer_bytes

    @property
    def grown(self) -> bool:
        return self.capacity_bytes > self.asked_bytes


def plan_buckets(
    plan: ReshardPlan, cap_bytes: int, *, double_buffered: bool = True, oversized: Oversized = "split"
) -> Buckets:
    """Rounds under a cap on the extra memory of a device.

    A unit of which some device receives more than a buffer holds is split at rows, or the buffers grow to it, or it is
    a ReshardError, as `oversized` says; so is a split that would have to cut a row.
    """
    buffers = 2 if double_buffered else 1
    buffer_bytes = cap_bytes // buffers
    if buffer_bytes < plan.element_bytes:
        raise ReshardError(f"a cap of {cap_bytes} bytes holds no element in each of {buffers} buffers")
    sizes = _unit_sizes(plan)
    largest = max((int(vector.max()) for _, vector in sizes), default=0) * plan.element_bytes
    if largest > buffer_bytes and oversized == "grow":
        buffer_bytes = largest
    limit = buffer_bytes // plan.element_bytes
    fitting: list[tuple[Unit, Vector]] = []
    for unit, vector in _balanced(plan, sizes):
        if int(vector.max()) <= limit:
            fitting.append((unit, vector))
            continue
        size = int(vector.max()) * plan.element_bytes
        if oversized == "error":
            raise ReshardError(f"{unit.local_tensor}: {size} bytes for a device, a buffer holds {buffer_bytes}")
        fitting += _split(plan, unit, vector, limit)
    rounds: list[tuple[Unit, ...]] = []
    current: list[Unit] = []
    most, load = 0, None
    for unit, vector in fitting:
        if load is None or int((load + vector).max()) > limit:
            if current:
                rounds.append(tuple(current))
            current, load = [], vector * 0
        load = load + vector
        current.append(unit)
        most = max(most, int(load.max()))
    if current:
        rounds.append(tuple(current))
    received = max(plan.loads.device_in.values(), default=0) * plan.element_bytes
    return Buckets(
        tuple(rounds),
        buffers,
        buffer_bytes,
        cap_bytes,
        most * plan.element_bytes,
        -(-received // max(buffers * buffer_bytes, 1)),
    )


def split_tensors(buckets: Buckets) -> tuple[tuple[str, int], ...]:
    """Local tensors that are sent in pieces, in the order of the rounds, and the most pieces of each; layers together,
    with `*` for their number."""
    found: dict[str, int] = {}
    for unit in (unit for units in buckets.rounds for unit in units if unit.pieces > 1):
        name = ".".join("*" if part.isdecimal() else part for part in unit.local_tensor.split("."))
        found[name] = max(found.get(name, 0), unit.pieces)
    return tuple(found.items())


def round_transfers(
    plan: ReshardPlan, units: tuple[Unit, ...], devices: Collection[int] | None = None
) -> Iterator[Transfer]:
    """The transfers of one round, of some devices only where given; together the rounds are `plan.transfers()`."""
    unit_of = {name: unit for unit in units if unit.pieces == 1 for name in unit.tensors}
    whole = list(plan.transfers(devices, unit_of)) if unit_of else []
    yield from whole
    for unit in units:
        if unit.pieces > 1:
            for transfer in _cut(plan.transfers(devices, unit.tensors), unit.most_elements):
                part = (unit.piece - _phase(transfer)) % unit.pieces
                first, last = row_range(rows(transfer.box)[0], part, part + 1, unit.pieces)
                if first < last:
                    yield replace(transfer, box=take_rows(transfer.box, first, last))


# --- units -----------------------------------------------------------------------------------------------------------


def _unit_sizes(plan: ReshardPlan) -> list[tuple[Unit, Vector]]:
    """Every local tensor of which something is received, in catalogue order."""
    import numpy as np

    position = {device: index for index, device in enumerate(plan.target.devices)}
    parts_of: dict[str, list[tuple[int, int]]] = {}
    for number, found in enumerate(plan.classes):
        for index, part in enumerate(found.parts):
            for name in part.names:
                parts_of.setdefault(name, []).append((number, index))
    absent = [np.array([position[device] for device in missing(found)], np.int64) for found in plan.classes]
    vectors: dict[tuple[tuple[int, int], ...], Vector] = {}
    target = Sharding(plan.catalogue, plan.target.layout, plan.target.storage)
    units: dict[str, Unit] = {}
    sums: dict[str, Vector] = {}
    for spec in plan.catalogue:
        key = tuple(parts_of.get(spec.name, ()))
        if key not in vectors:
            vectors[key] = np.zeros(len(position), np.int64)
            for number, index in key:
                vectors[key][absent[number]] += plan.classes[number].parts[index].elements_each
        local, position_in = target.local(spec.name)
        if position_in == 0:
            units[local.name] = Unit(local.name, tuple(p.name for p in local.parts))
        before = sums.get(local.name)
        sums[local.name] = vectors[key] if before is None else before + vectors[key]
    return [(units[name], vector) for name, vector in sums.items() if vector.any()]


def _balanced(plan: ReshardPlan, sizes: list[tuple[Unit, Vector]]) -> Iterator[tuple[Unit, Vector]]:
    """Units in the order that lets all stages advance together: always from the pair of stages that is furthest back.

    The key of a pair is the larger of the shares of their bytes that source and target stages have done.
    """
    source = Sharding(plan.catalogue, plan.source.layout, plan.source.storage)
    target = Sharding(plan.catalogue, plan.target.layout, plan.target.storage)
    queues: dict[tuple[tuple[str, int], ...], list[tuple[Unit, Vector, int]]] = {}
    totals: dict[tuple[str, int], int] = {}
    for unit, vector in sizes:
        spec = plan.catalogue[unit.tensors[0]]
        stages = (*(("from", s) for s in source.stages(spec)), *(("to", s) for s in target.stages(spec)))
        weight = int(vector.sum())
        queues.setdefault(stages, []).append((unit, vector, weight))
        for stage in stages:
            totals[stage] = totals.get(stage, 0) + weight
    done = dict.fromkeys(totals, 0)
    heads = dict.fromkeys(queues, 0)

    def progress(stages: tuple[tuple[str, int], ...]) -> tuple[float, float]:
        weight = queues[stages][heads[stages]][2]
        shares = [(done[stage] + weight) / totals[stage] for stage in stages]
        return max(shares), sum(shares)

    while heads:
        stages = min(heads, key=progress)
        unit, vector, weight = queues[stages][heads[stages]]
        yield unit, vector
        for stage in stages:
            done[stage] += weight
        heads[stages] += 1
        if heads[stages] == len(queues[stages]):
            del heads[stages]


def _cut(transfers: Iterable[Transfer], most_elements: int) -> Iterator[Transfer]:
    for transfer in transfers:
        for box in with_rows_below(transfer.box, most_elements):
            yield replace(transfer, box=box)


def _phase(transfer: Transfer) -> int:
    """Which piece gets the first rows of a box: boxes of few rows would otherwise all end in the same piece."""
    return zlib.crc32(repr((transfer.tensor, transfer.box)).encode())


def _split(plan: ReshardPlan, unit: Unit, vector: Vector, limit: int) -> list[tuple[Unit, Vector]]:
    """Equal pieces of which each fits, few of them, by trying; the loads of pieces are exact."""
    import numpy as np

    position = {device: index for index, device in enumerate(plan.target.devices)}
    whole = plan.transfers(names=unit.tensors)
    boxes = [(position[t.target], _phase(t), *rows(t.box)) for t in _cut(whole, limit)]
    least_row = max((each for *_, each in boxes), default=0)
    if least_row > limit:
        row, room = least_row * plan.element_bytes, limit * plan.element_bytes
        raise ReshardError(f"{unit.local_tensor}: one row of a transfer has {row} bytes, a buffer holds {room}")
    where, phase, counts, each = np.array(boxes, np.int64).T
    pieces = -(-int(vector.max()) // limit)
    while pieces <= int(vector.max()):
        loads = []
        for piece in range(pieces):
            part = (piece - phase) % pieces
            taken = counts * (part + 1) // pieces - counts * part // pieces
            loads.append(np.bincount(where, taken * each, len(position)).astype(np.int64))
        if all(int(load.max()) <= limit for load in loads):
            split = replace(unit, pieces=pieces, most_elements=limit)
            return [(replace(split, piece=piece), load) for piece, load in enumerate(loads)]
        pieces += 1 + pieces // 16
    raise ReshardError(f"{unit.local_tensor} does not split into pieces of {limit * plan.element_bytes} bytes")


def received_in(plan: ReshardPlan, units: tuple[Unit, ...]) -> dict[int, int]:
    """Bytes that every device receives in a round, counted transfer by transfer."""
    found: dict[int, int] = {}
    for transfer in round_transfers(plan, units):
        found[transfer.target] = found.get(transfer.target, 0) + volume(transfer.box) * plan.element_bytes
    return found
