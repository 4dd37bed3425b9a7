"""Boxes: products of half-open intervals, one per dimension, in the index space of a tensor.

A region is a list of boxes. Regions that come out of this module are disjoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from rlflow.reshard.intervals import Intervals

Box = tuple[tuple[int, int], ...]
"""[low, high) per dimension; a scalar has the empty box, of volume 1."""
Shape = tuple[int, ...]


def whole(shape: Shape) -> Box:
    return tuple((0, n) for n in shape)


def extents(box: Box) -> Shape:
    return tuple(high - low for low, high in box)


def volume(box: Box) -> int:
    """Elements."""
    return prod(high - low for low, high in box)


def intersect(a: Box, b: Box) -> Box | None:
    """None where they share no element."""
    found = []
    for (low, high), (other_low, other_high) in zip(a, b, strict=True):
        low, high = max(low, other_low), min(high, other_high)
        if low >= high:
            return None
        found.append((low, high))
    return tuple(found)


def subtract(a: Box, b: Box) -> list[Box]:
    """`a` without `b`, as disjoint boxes: what sticks out on either side, one dimension after another."""
    common = intersect(a, b)
    if common is None:
        return [a] if volume(a) else []
    left, core = [], list(a)
    for dim, (low, high) in enumerate(common):
        for side in ((core[dim][0], low), (high, core[dim][1])):
            if side[0] < side[1]:
                left.append((*core[:dim], side, *core[dim + 1 :]))
        core[dim] = (low, high)
    return left


def difference(region: Iterable[Box], other: Iterable[Box]) -> list[Box]:
    """What of a disjoint region is not in the other."""
    left = [box for box in region if volume(box)]
    for hole in other:
        left = [piece for box in left for piece in subtract(box, hole)]
    return left


def disjoint(boxes: Iterable[Box]) -> list[Box]:
    """The union of boxes that may overlap, as disjoint boxes."""
    found: list[Box] = []
    for box in boxes:
        found += difference([box], found)
    return found


def union_volume(boxes: Iterable[Box]) -> int:
    """Elements of the union of boxes that may overlap."""
    return sum(map(volume, disjoint(boxes)))


def products(per_dimension: Iterable[Intervals]) -> list[Box]:
    """The product of interval unions as boxes."""
    return [tuple(box) for box in product(*per_dimension)]


def relative(box: Box, origin: Box) -> Box:
    """In coordinates whose zero is the low corner of `origin`."""
    return tuple((low - start, high - start) for (low, high), (start, _) in zip(box, origin, strict=True))


def shifted(box: Box, by: Iterable[int]) -> Box:
    return tuple((low + n, high + n) for (low, high), n in zip(box, by, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)


# --- memory order ----------------------------------------------------------------------------------------------------


def row_dim(box: Box) -> int:
    """The dimension along which a box is cut into rows: the first with more than one index."""
    return next((dim for dim, (low, high) in enumerate(box) if high - low > 1), 0)


def rows(box: Box) -> tuple[int, int]:
    """Number of rows, and elements of one."""
    if not box:
        return 1, 1
    low, high = box[row_dim(box)]
    return high - low, volume(box) // max(high - low, 1)


def take_rows(box: Box, first: int, last: int) -> Box:
    """Rows [first, last) of a box, counted from its own first row."""
    if not box:
        return box
    dim = row_dim(box)
    low = box[dim][0]
    return (*box[:dim], (low + first, low + last), *box[dim + 1 :])


def with_rows_below(box: Box, most: int) -> Iterator[Box]:
    """The box in boxes whose rows have at most `most` elements, as few as possible; the last dimension is not cut."""
    count, each = rows(box)
    if each <= most or row_dim(box) >= len(box) - 2:
        yield box
        return
    for row in range(count):
        yield from with_rows_below(take_rows(box, row, row + 1), most)


def flat_boxes(shape: Shape, first: int, last: int) -> list[Box]:
    """Elements [first, last) of a tensor in row-major order as boxes, in that order; at most 2 x dimensions - 1."""
    if first >= last:
        return []
    if not shape:
        return [()]
    inner = prod(shape[1:])
    low, high = -(-first // inner), last // inner
    if low > high:  # inside one row
        row = high
        return [((row, row + 1), *b) for b in flat_boxes(shape[1:], first - row * inner, last - row * inner)]
    found: list[Box] = []
    if first < low * inner:
        row = low - 1
        found += [((row, low), *b) for b in flat_boxes(shape[1:], first - row * inner, inner)]
    if low < high:
        found.append(((low, high), *whole(shape[1:])))
    if high * inner < last:
        found += [((high, high + 1), *b) for b in flat_boxes(shape[1:], 0, last - high * inner)]
    return found


def runs(box: Box, shape: Shape) -> Iterator[tuple[Box, int]]:
    """Cut a box into boxes that are contiguous in a row-major tensor of this shape: (box, offset of its first)."""
    inner = len(shape)
    while inner > 0 and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    lead = max(inner - 1, 0)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for index in product(*(range(low, high) for low, high in box[:lead])):
        piece = (*((i, i + 1) for i in index), *box[lead:])
        yield piece, sum(low * stride for (low, _), stride in zip(piece, strides, strict=True))


def address_span(box: Box, shape: Shape) -> tuple[int, int]:
    """[first, last + 1) of a box in a row-major tensor: all of its elements lie within."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(low * stride for (low, _), stride in zip(box, strides, strict=True))
    return first, sum((high - 1) * stride for (_, high), stride in zip(box, strides, strict=True)) + 1
