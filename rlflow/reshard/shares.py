"""Shares: which part of an atom class comes from which source.

A share is an interval of [0, WHOLE). A large box is cut at rows in that proportion, so that every source is busy for
every tensor; a small one goes whole to one share, tensors taking turns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rlflow.reshard.atoms import AtomClass
from rlflow.reshard.boxes import Box, rows, take_rows, volume
from rlflow.values import dataclass

WHOLE = 1 << 16
TURN = 40503
"""Near WHOLE / golden ratio: multiples of it, modulo WHOLE, are spread evenly (Knuth, multiplicative hashing)."""


@dataclass(frozen=True, slots=True)
class Share:
    source: int
    low: int
    high: int
    node_turn: int = 0
    """With multicast: the number of the node that the chain starts at."""
    device_turn: int = 0
    """The same for the devices of every node, modulo their number."""


def row_range(count: int, low: int, high: int, whole: int = WHOLE) -> tuple[int, int]:
    """Rows of `count` in the share: shares that tile [0, whole) tile the rows."""
    return count * low // whole, count * high // whole


def share_cells(
    found: AtomClass, low: int, high: int, min_elements: int, names: Collection[str] | None = None
) -> Iterator[tuple[str, Box]]:
    """(tensor, box) of a share, of some tensors only where given; boxes below `min_elements` elements are not cut."""
    for part in found.parts:
        for number, name in enumerate(part.names):
            if names is not None and name not in names:
                continue
            for index, box in enumerate(part.boxes):
                if volume(box) < min_elements:
                    if low <= (number + index) * TURN % WHOLE < high:
                        yield name, box
                    continue
                first, last = row_range(rows(box)[0], low, high)
                if first < last:
                    yield name, take_rows(box, first, last)


def share_elements(found: AtomClass, low: int, high: int, min_elements: int) -> int:
    """Elements of `share_cells`, without a step per tensor where boxes are large."""
    if low == 0 and high == WHOLE:
        return found.elements
    total = 0
    for part in found.parts:
        for index, (size, count, each) in enumerate(part.sizes):
            if size < min_elements:
                turns = sum(low <= (number + index) * TURN % WHOLE < high for number in range(len(part.names)))
                total += turns * size
            else:
                first, last = row_range(count, low, high)
                total += len(part.names) * (last - first) * each
    return total
