"""Reshard in place, tensor by tensor: an order short enough to stand in a plan, whatever the number of devices.

Each tensor is laid out anew on all devices at once. It may be written where nothing lies that is still to be read; a
tensor in the way of itself, or of a circle, is read into staging buffers first (the parallel copy problem of `inplace`,
with tensors for pieces).
"""

from __future__ import annotations

from math import prod

from rlflow.reshard.arenas import same_memory, sides
from rlflow.reshard.catalogue import Catalogue
from rlflow.reshard.endpoint import Endpoint
from rlflow.reshard.inplace import Act, InPlaceOrder, Step, overlaps
from rlflow.reshard.intervals import Interval
from rlflow.reshard.plan import ReshardPlan, Transfer
from rlflow.reshard.shards import Sharding
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class TensorOrder:
    """(act, tensor) in an order in which nothing is overwritten before it is read."""

    steps: tuple[tuple[Act, str], ...]
    staging_bytes: int
    """The most that a device holds aside at a time, beside the larger of its two layouts."""


def order_tensors(tensors: Catalogue, source: Endpoint, target: Endpoint) -> TensorOrder:
    """The order of all tensors but those that lie still on every device.

    Staging is kept small and is not proven least. ReshardError for a layout that cannot hold the model.
    """
    before = Sharding(tensors, source.layout, source.storage)
    after = Sharding(tensors, target.layout, target.storage)
    names = [spec.name for spec in tensors]
    sizes: list[dict[int, int]] = [{} for _ in names]
    unread: list[set[int]] = [set() for _ in names]
    moved: set[int] = set()
    for group, alike in enumerate(_alike(source, target)):
        old, new = alike[0]
        reads, writes = _intervals(before, old, names), _intervals(after, new, names)
        here = dict(writes)
        still = {number for number, where in reads if here.get(number) == where}
        for number in list(still):
            if any(not _same_pieces(before, old, after, new, names[number]) for old, new in alike):
                still.discard(number)
        moved |= {number for number, _ in (*reads, *writes)} - still
        for number, (low, high) in reads:
            sizes[number][group] = high - low
        for reader, writer in overlaps(_by_place(reads), _by_place(writes)):
            if reader != writer or reader not in still:
                unread[writer].add(reader)
    steps, staging = _order(unread, sizes, moved)
    return TensorOrder(tuple((act, names[number]) for act, number in steps), staging)


def as_steps(plan: ReshardPlan, order: TensorOrder, bucket_bytes: int) -> InPlaceOrder:
    """The order with the transfers of a plan between the same ends, one by one. What one device sends to several is
    staged for each of them here, so that its staging may exceed that of the order."""
    before, after = sides(plan)
    of_tensor: dict[str, list[Transfer]] = {}
    for transfer in (*plan.copies(), *plan.transfers()):
        still = transfer.source == transfer.target and same_memory(
            before, after, transfer.source, transfer.tensor, transfer.box
        )
        if not still:
            of_tensor.setdefault(transfer.tensor, []).append(transfer)
    steps: list[Step] = []
    for act, tensor in order.steps:
        for transfer in of_tensor.get(tensor, ()):
            if transfer.step == 0 or act is Act.MOVE:
                steps.append(Step(act, transfer))
            elif act is Act.UNSTAGE:
                steps.append(Step(Act.MOVE, transfer))  # passed on from where it has just arrived
    arena = {d: max(before.size.get(d, 0), after.size.get(d, 0)) for d in before.size.keys() | after.size.keys()}
    staging = {device: order.staging_bytes for device in before.size} if order.staging_bytes else {}
    return InPlaceOrder(tuple(steps), arena, staging, bucket_bytes)


Ranks = tuple[int | None, int | None]
"""Of a device before and after; None on the side that it is not part of."""


def _alike(source: Endpoint, target: Endpoint) -> list[list[Ranks]]:
    """Devices in groups that have tensors of the same sizes in the same places, before and after: those of the same
    pipeline stages, or each on its own where ranks of a stage hold parts of tensors (zero = 3)."""
    old = {device: rank for rank, device in enumerate(source.devices)}
    new = {device: rank for rank, device in enumerate(target.devices)}
    groups: dict[Ranks, list[Ranks]] = {}
    for device in sorted(old.keys() | new.keys()):
        ranks = old.get(device), new.get(device)
        groups.setdefault((_stage(source, ranks[0]), _stage(target, ranks[1])), []).append(ranks)
    return list(groups.values())


def _stage(end: Endpoint, rank: int | None) -> int | None:
    layout = end.layout
    return rank if rank is None or layout.zero == 3 else rank // (layout.dp * layout.cp * layout.tp)


def _intervals(side: Sharding, rank: int | None, names: list[str]) -> list[tuple[int, Interval]]:
    """The number of every tensor that the rank holds, and its bytes, one tensor after another as in an arena."""
    if rank is None:
        return []
    places: dict[str, Interval] = {}
    start = 0
    for name, local in side.local_tensors(rank).items():
        end = start + prod(side.local_shape(rank, local)) * side.storage.element_bytes
        places[name], start = (start, end), end
    found = ((number, places.get(side.local(name)[0].name)) for number, name in enumerate(names))
    return [(number, where) for number, where in found if where is not None]


def _by_place(intervals: list[tuple[int, Interval]]) -> list[tuple[Interval, int]]:
    return [(where, number) for number, where in intervals]


def _same_pieces(before: Sharding, old: int | None, after: Sharding, new: int | None, name: str) -> bool:
    """Whether a rank's part of a tensor is the same, in the same order of bytes, before and after."""
    assert old is not None
    assert new is not None
    return before.storage == after.storage and before.pieces(old, name) == after.pieces(new, name)


def _kept_aside(number: int, readers: set[int], sizes: list[dict[int, int]]) -> tuple[int, int]:
    """Bytes that stay staged once the tensor is written, and those that are staged for it."""
    size = {reader: max(sizes[reader].values(), default=0) for reader in readers}
    return sum(size.values()) - size.get(number, 0), sum(size.values())


def _order(unread: list[set[int]], sizes: list[dict[int, int]], moved: set[int]) -> tuple[list[tuple[Act, int]], int]:
    """Write what nothing stands in the way of; where all wait, stage what stands in the way of the cheapest."""
    waiting_for: list[list[int]] = [[] for _ in unread]
    for writer, readers in enumerate(unread):
        for reader in readers:
            waiting_for[reader].append(writer)
    steps: list[tuple[Act, int]] = []
    left = set(moved)
    held: dict[int, int] = {}
    staged: set[int] = set()
    most = 0

    def read(number: int) -> None:
        for writer in waiting_for[number]:
            unread[writer].discard(number)

    for number in range(len(unread)):
        if number not in moved:  # what lies still everywhere is never overwritten: others are laid out around it
            read(number)
    ready = sorted(number for number in left if not unread[number])
    while left:
        if not ready:
            cheapest = min(left, key=lambda n: (_kept_aside(n, unread[n], sizes), n))
            for reader in sorted(unread[cheapest]):
                steps.append((Act.STAGE, reader))
                staged.add(reader)
                for device, size in sizes[reader].items():
                    held[device] = held.get(device, 0) + size
                read(reader)
            most = max(most, max(held.values()))
        else:
            for number in ready:
                steps.append((Act.UNSTAGE if number in staged else Act.MOVE, number))
                left.discard(number)
                if number in staged:
                    for device, size in sizes[number].items():
                        held[device] -= size
                else:
                    read(number)
        ready = sorted(number for number in left if not unread[number])
    return steps, most
