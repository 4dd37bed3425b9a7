"""Placements: how a mesh axis of some size divides a tensor; applied one axis after another.

The vocabulary is that of torch's DTensor (Replicate, Shard, _StridedShard), with the owner of a pipeline stage and the
flat slices of ZeRO-3 (Rajbhandari et al. 2020) added. `Partial` has no meaning for weights and does not exist here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Protocol

from rlflow.reshard.boxes import Box, Shape, extents, flat_boxes, intersect, relative, runs, shifted, volume, whole
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """`box` of canonical tensor number `part` lies at `local` of the shard.

    Both have the same extents, except in a flat shard, where `local` is one range that holds `box` in row-major order.
    """

    box: Box
    local: Box
    part: int = 0

    def locate(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """(canonical box, local box) of what of `box` is in this piece; the pairs tile it."""
        common = intersect(self.box, box)
        if common is None:
            return
        if extents(self.box) == extents(self.local):
            yield common, shifted(relative(common, self.box), (low for low, _ in self.local))
            return
        start = self.local[0][0]
        for inner, offset in runs(relative(common, self.box), extents(self.box)):
            canonical = shifted(inner, (low for low, _ in self.box))
            yield canonical, ((start + offset, start + offset + volume(inner)),)


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of one local tensor. Elements in no piece are padding."""

    shape: Shape
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, shape: Shape, padded: Shape | None = None) -> Shard:
        """The whole of a tensor, at the low corner of a possibly larger one."""
        return cls(padded or shape, (Piece(whole(shape), whole(shape)),))

    @property
    def elements(self) -> int:
        """With padding."""
        return prod(self.shape)

    def boxes(self, part: int = 0) -> tuple[Box, ...]:
        """Canonical boxes of one of its tensors, in order of their corners."""
        return tuple(sorted(p.box for p in self.pieces if p.part == part))

    def window(self, dim: int, low: int, high: int, at: int = 0) -> list[Piece]:
        """The pieces in [low, high) of a local dimension, moved so that `low` comes to `at`."""
        found = []
        for piece in self.pieces:
            start, end = piece.local[dim]
            first, last = max(start, low), min(end, high)
            if first < last:
                base = piece.box[dim][0] - start
                box = (*piece.box[:dim], (first + base, last + base), *piece.box[dim + 1 :])
                local = (*piece.local[:dim], (first - low + at, last - low + at), *piece.local[dim + 1 :])
                found.append(Piece(box, local, piece.part))
        return found


class Placement(Protocol):
    def apply(self, shard: Shard, size: int, coordinate: int) -> Shard:
        """What the rank at `coordinate` of an axis of `size` ranks holds of `shard`."""
        ...


def chunk(extent: int, size: int, coordinate: int) -> tuple[int, int]:
    """[low, high) as torch.chunk cuts: pieces of ceil(extent / size), the last ones smaller or empty."""
    step = -(-extent // size)
    low = min(coordinate * step, extent)
    return low, min(low + step, extent)


@dataclass(frozen=True, slots=True)
class R:
    """Replicated."""

    def apply(self, shard: Shard, size: int, coordinate: int) -> Shard:
        return shard


@dataclass(frozen=True, slots=True)
class S:
    """Sharded: chunk `coordinate` of dimension `dim`."""

    dim: int

    def apply(self, shard: Shard, size: int, coordinate: int) -> Shard:
        low, high = chunk(shard.shape[self.dim], size, coordinate)
        return Shard(_with(shard.shape, self.dim, high - low), tuple(shard.window(self.dim, low, high)))


@dataclass(frozen=True, slots=True)
class SS:
    """Strided (block-cyclic): dimension `dim` is cut into `blocks`, and chunk `coordinate` of every block is held."""

    dim: int
    blocks: int

    def apply(self, shard: Shard, size: int, coordinate: int) -> Shard:
        pieces: list[Piece] = []
        extent = 0
        for block in range(self.blocks):
            start, end = chunk(shard.shape[self.dim], self.blocks, block)
            low, high = chunk(end - start, size, coordinate)
            pieces += shard.window(self.dim, start + low, start + high, at=extent)
            extent += high - low
        return Shard(_with(shard.shape, self.dim, extent), tuple(pieces))


@dataclass(frozen=True, slots=True)
class Own:
    """Held whole by one coordinate, not at all by the others: the owner of a layer among the pipeline stages."""

    stage: int

    def apply(self, shard: Shard, size: int, coordinate: int) -> Shard:
        return shard if coordinate == self.stage else Shard((0,) * len(shard.shape), ())


@dataclass(frozen=True, slots=True)
class Flat:
    """Elements [offset, offset + length) of the shard in row-major order, as a vector; what lies beyond is padding."""

    offset: int
    length: int

    def apply(self, shard: Shard, size: int, coordinate: int) -> Shard:
        pieces = []
        for segment in flat_boxes(shard.shape, self.offset, min(self.offset + self.length, shard.elements)):
            for piece in shard.pieces:
                common = intersect(piece.local, segment)
                if common is None:
                    continue
                for inner, offset in runs(common, shard.shape):
                    start = offset - self.offset
                    box = shifted(relative(inner, piece.local), (low for low, _ in piece.box))
                    pieces.append(Piece(box, ((start, start + volume(inner)),), piece.part))
        return Shard((self.length,), tuple(pieces))

    @classmethod
    def equal(cls, shard: Shard, size: int, coordinate: int) -> Flat:
        """ZeRO-3: every rank the same length, the last ones padded."""
        length = -(-shard.elements // size)
        return cls(coordinate * length, length)


def concatenate(shards: Sequence[Shard], dim: int, interleave: int = 1) -> Shard:
    """One local tensor of several; piece.part becomes the index in `shards`.

    `interleave` = n: every shard is cut into n equal blocks, and the blocks alternate: block 0 of all, block 1 of all.
    """
    pieces: list[Piece] = []
    at = 0
    for block in range(interleave):
        for part, shard in enumerate(shards):
            step = shard.shape[dim] // interleave
            window = shard.window(dim, block * step, (block + 1) * step, at)
            pieces += [Piece(p.box, p.local, part) for p in window]
            at += step
    return Shard(_with(shards[0].shape, dim, at), tuple(pieces))


def _with(shape: Shape, dim: int, extent: int) -> Shape:
    return (*shape[:dim], extent, *shape[dim + 1 :])
