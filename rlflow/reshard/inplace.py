"""Reshard in place: target shards fill the memory of the source shards as these are read.

This is the parallel copy problem: a move may write where another has yet to read. Moves are ordered so that every
reader comes before the writer of its bytes; where that runs in a circle, one move of it is read into a staging buffer
first, which makes its bytes free (the moves so chosen are a feedback vertex set). Pieces are small, so is the buffer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import StrEnum

from rlflow.reshard.arenas import Side, same_memory, sides
from rlflow.reshard.boxes import Box, rows, take_rows, volume, with_rows_below
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.intervals import Interval
from rlflow.reshard.plan import ReshardPlan, Transfer
from rlflow.reshard.shares import row_range
from rlflow.values import dataclass


class Act(StrEnum):
    MOVE = "move"
    """Read and write."""
    STAGE = "stage"
    """Read into the sender's staging buffer, in the source's element type."""
    UNSTAGE = "unstage"
    """Write from there, and free it."""


@dataclass(frozen=True, slots=True)
class Step:
    act: Act
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class InPlaceOrder:
    """Steps in an order in which nothing is overwritten before it is read. Bytes are by device."""

    steps: tuple[Step, ...]
    arena_bytes: dict[int, int]
    """The larger of the two layouts."""
    staging_bytes: dict[int, int]
    """The most that is staged at a time; devices that stage nothing are left out."""
    bucket_bytes: int

    @property
    def fits(self) -> bool:
        """Whether no device stages more than the bucket."""
        return max(self.staging_bytes.values(), default=0) <= self.bucket_bytes


PIECES_PER_BUCKET = (4, 16, 64)
"""How finely moves are cut: the coarsest that fits is taken."""


def order_in_place(plan: ReshardPlan, bucket_bytes: int) -> InPlaceOrder:
    """Order of the plan's copies and transfers, in pieces of a quarter of the bucket or less.

    The peak of a device is its larger layout + what it stages. Staging is kept small but not proven least (a minimum
    feedback vertex set is NP-hard, Karp 1972); `fits` says whether the bucket sufficed. ReshardError where a row is
    larger than the bucket.
    """
    before, after = sides(plan)
    steps, staging = min(_tries(plan, before, after, bucket_bytes), key=lambda found: max(found[1].values(), default=0))
    devices = sorted(before.size.keys() | after.size.keys())
    arena = {device: max(before.size.get(device, 0), after.size.get(device, 0)) for device in devices}
    return InPlaceOrder(tuple(steps), arena, staging, bucket_bytes)


Found = tuple[list[Step], dict[int, int]]


def _tries(plan: ReshardPlan, before: Side, after: Side, bucket_bytes: int) -> list[Found]:
    """Ever finer pieces until one fits."""
    found: list[Found] = []
    for parts in PIECES_PER_BUCKET:
        moves = _moves(plan, before, after, bucket_bytes, parts)
        found.append(_Ordering(moves, before, after).run())
        if max(found[-1][1].values(), default=0) <= bucket_bytes:
            break
    return found


def _moves(plan: ReshardPlan, before: Side, after: Side, bucket_bytes: int, parts: int) -> list[Transfer]:
    """Copies that change an address, and transfers; in pieces."""
    each = max(before.element_bytes, after.element_bytes)
    moves: list[Transfer] = []
    for transfer in plan.copies():
        if not same_memory(before, after, transfer.source, transfer.tensor, transfer.box):
            moves += _pieces(transfer, each, bucket_bytes, parts)
    for transfer in plan.transfers():
        moves += _pieces(transfer, each, bucket_bytes, parts)
    return moves


def _pieces(transfer: Transfer, element_bytes: int, bucket_bytes: int, parts: int) -> Iterator[Transfer]:
    for box in with_rows_below(transfer.box, bucket_bytes // (parts * element_bytes)):
        count, row = rows(box)
        if row * element_bytes > bucket_bytes:
            raise ReshardError(f"{transfer.tensor}: a row has {row * element_bytes} bytes, the bucket {bucket_bytes}")
        size = volume(box) * element_bytes
        pieces = min(count, max(1, -(-size * parts // bucket_bytes)))
        for number in range(pieces):
            first, last = row_range(count, number, number + 1, pieces)
            yield replace(transfer, box=take_rows(box, first, last))


class _Ordering:
    """A move may be written when all that it overwrites has been read, and what it passes on has been written."""

    def __init__(self, moves: list[Transfer], before: Side, after: Side) -> None:
        self.moves = moves
        self.staged_size = [volume(move.box) * before.element_bytes for move in moves]
        self.unread: list[set[int]] = [set() for _ in moves]
        """Moves, perhaps itself, that read what this one overwrites."""
        self.overwriters: list[list[int]] = [[] for _ in moves]
        self.parent: dict[int, int] = {}
        self.children: list[list[int]] = [[] for _ in moves]
        self._hazards(before, after)
        self._forwarding()
        self.is_read = [False] * len(moves)
        self.is_written = [False] * len(moves)
        self.unread_size = [sum(self.staged_size[reader] for reader in readers) for readers in self.unread]
        self.ready: list[int] = []
        self.blocked: list[tuple[int, int]] = []
        """(price, move), with outdated entries."""
        self.steps: list[Step] = []
        self.held: dict[int, int] = {}
        self.peak: dict[int, int] = {}

    def _hazards(self, before: Side, after: Side) -> None:
        reads: dict[int, list[tuple[Interval, int]]] = {}
        writes: dict[int, list[tuple[Interval, int]]] = {}
        for number, move in enumerate(self.moves):
            if move.step == 0 and move.source in after.size:
                for interval in before.bytes_of(move.source, move.tensor, move.box):
                    reads.setdefault(move.source, []).append((interval, number))
            if move.target in before.size:
                for interval in after.bytes_of(move.target, move.tensor, move.box):
                    writes.setdefault(move.target, []).append((interval, number))
        for device in sorted(reads.keys() & writes.keys()):
            for reader, writer in overlaps(reads[device], writes[device]):
                if reader not in self.unread[writer]:
                    self.unread[writer].add(reader)
                    self.overwriters[reader].append(writer)

    def _forwarding(self) -> None:
        """What is passed on has to have arrived."""
        arrival: dict[tuple[str, Box, int], int] = {}
        for number, move in enumerate(self.moves):
            arrival[move.tensor, move.box, move.target] = number
        for number, move in enumerate(self.moves):
            if move.step:
                self.parent[number] = arrival[move.tensor, move.box, move.source]
                self.children[self.parent[number]].append(number)

    def run(self) -> tuple[list[Step], dict[int, int]]:
        for number in range(len(self.moves)):
            self._offer(number)
        left = len(self.moves)
        while left:
            if not self.ready:
                self._make_room()
            number = heapq.heappop(self.ready)
            if self.is_written[number]:
                continue
            staged = self.is_read[number]
            self._emit(Act.UNSTAGE if staged else Act.MOVE, number)
            self.is_written[number] = True
            left -= 1
            if staged:
                self.held[self.moves[number].source] -= self.staged_size[number]
            else:
                self._read(number)
            for child in self.children[number]:
                self._offer(child)
        return self.steps, {device: size for device, size in sorted(self.peak.items()) if size}

    def _offer(self, number: int) -> None:
        """Note that a move may have become possible, or cheaper to make possible."""
        parent = self.parent.get(number)
        if self.is_written[number] or (parent is not None and not self.is_written[parent]):
            return
        if self.unread[number]:
            heapq.heappush(self.blocked, (self._price(number), number))
        else:
            heapq.heappush(self.ready, number)

    def _price(self, number: int) -> int:
        """Bytes that staging must take in before this move can be written, less what writing it gives back."""
        return self.unread_size[number] - (self.staged_size[number] if self.is_read[number] else 0)

    def _make_room(self) -> None:
        """All moves wait for each other: stage what stands in the way of the cheapest."""
        while True:
            price, number = heapq.heappop(self.blocked)
            if self.unread[number] and not self.is_written[number] and price == self._price(number):
                break
        for reader in sorted(self.unread[number]):
            self._stage(reader)

    def _emit(self, act: Act, number: int) -> None:
        self.steps.append(Step(act, self.moves[number]))

    def _read(self, number: int) -> None:
        self.is_read[number] = True
        for writer in self.overwriters[number]:
            self.unread[writer].discard(number)
            self.unread_size[writer] -= self.staged_size[number]
            self._offer(writer)

    def _stage(self, number: int) -> None:
        device = self.moves[number].source
        self._emit(Act.STAGE, number)
        self.held[device] = self.held.get(device, 0) + self.staged_size[number]
        self.peak[device] = max(self.peak.get(device, 0), self.held[device])
        self._read(number)
        self._offer(number)


def overlaps(
    reads: Iterable[tuple[Interval, int]], writes: Iterable[tuple[Interval, int]]
) -> Iterator[tuple[int, int]]:
    """(reader, writer) pairs that share a byte: a sweep over the starts."""
    events = sorted(
        [(low, high, 0, number) for (low, high), number in reads]
        + [(low, high, 1, number) for (low, high), number in writes]
    )
    active: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # (end, number): reads, writes
    for low, high, kind, number in events:
        others = active[1 - kind]
        while others and others[0][0] <= low:
            heapq.heappop(others)
        for _, other in others:
            yield (number, other) if kind == 0 else (other, number)
        heapq.heappush(active[kind], (high, number))
