"""A worker's ends of the queues between pools: the calls of every rank that it stands for.

Each rank puts a part of its own, as in a run with devices, and each block of ranks that reads together takes once.
These calls are under way at the same time, as on a cluster, where every rank is a process. What comes is checked: every
row once, in the order of the step that made it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlflow.backends.ray_runtime.dist_queue.client import DistQueue
from rlflow.backends.ray_runtime.dist_queue.edges import edge_of, readers_of
from rlflow.backends.ray_runtime.dist_queue.rows import EdgeSpec, RowFacts
from rlflow.backends.ray_runtime.virtual.post import Post
from rlflow.backends.ray_runtime.virtual.rows import Rows, bounds, joined
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import Plan, Queue

OpenEnd = Callable[[EdgeSpec, Sequence[Any], str, int], DistQueue]


@dataclass(frozen=True)
class Held:
    """A worker's part of a value. `total` rows on all ranks of the pool, of which the first has the number `base`."""

    rows: Rows
    total: int
    base: int


@dataclass
class Ends:
    """Of one worker. Failures of a queue are those of `DistQueue`."""

    plan: Plan
    pool: str
    ranks: range
    """That the worker stands for."""
    sizes: Mapping[str, int]
    """Ranks of every pool."""
    actors: Mapping[str, Sequence[Any]]
    """Of the queues, by id."""
    post: Post
    """Counts what goes through the queues too."""
    open_end: OpenEnd = DistQueue
    _put: dict[str, int] = field(default_factory=dict)
    _taken: dict[str, int] = field(default_factory=dict)
    _opened: dict[str, DistQueue] = field(default_factory=dict)

    def put(self, queue_id: str, held: Held) -> None:
        """The part of every rank; waits while the queue is full."""
        end = self._end(self._queue(queue_id))
        number = self._put[queue_id] = self._put.get(queue_id, -1) + 1
        size = self.sizes[self.pool]
        first = bounds(held.total, size, self.ranks.start)[0]
        note = pickle.dumps((held.total, held.base))
        parts = []
        for rank in self.ranks:
            low, high = bounds(held.total, size, rank)
            rows = held.rows.part(low - first, high - first)
            facts = RowFacts((number * size + rank,), (number,), notes=(note,), spans=((0, rows.count),))
            parts.append((f"rank {rank}", facts, rows.fields()))
        started = time.perf_counter()
        end.put_each(parts)
        self.post.count("put", time.perf_counter() - started, len(parts))

    def take(self, queue_id: str, made: int | None) -> tuple[Held, int]:
        """The worker's rows of the queue's next batch, and how many batches the queue held.

        `made`: samples that a step makes, where the queue carries those of every step in order: what comes must then be
        rows of this very step. RunFailure RLF5058 for rows that are missing or doubled.
        """
        queue = self._queue(queue_id)
        end = self._end(queue)
        number = self._taken[queue_id] = self._taken.get(queue_id, -1) + 1
        size = self.sizes[self.pool]
        block = size // readers_of(queue, size)
        blocks, depth, total, base = [], 0, 0, 0
        firsts = range(self.ranks.start, self.ranks.stop, block)
        readers = [f"reader {first // block}" for first in firsts]
        started = time.perf_counter()
        readings = end.take_each(readers, end.spec.group)
        self.post.count("take", time.perf_counter() - started, len(readers))
        for first, reader, reading in zip(firsts, readers, readings, strict=True):
            depth = max(depth, reading.depth)
            total, base = pickle.loads(reading.facts.notes[0])
            low, high = bounds(total, size, first)[0], bounds(total, size, first + block - 1)[1]
            parts = _needed(total, len(reading), low, high)
            reading.load([part for part, _, _ in parts])
            self.post.count("fetch", 0.0, len(parts))
            rows = joined(
                [
                    Rows.of(reading.columns([part])).part(max(low, begin) - begin, max(low, min(high, stop)) - begin)
                    for part, begin, stop in parts
                ]
            )
            self._check(queue, number, rows, high - low, made)
            blocks.append(rows)
            end.done(reader, reading.groups)
            self.post.count("done", 0.0)
        return Held(joined(blocks), total, base), depth

    def _check(self, queue: Queue, number: int, rows: Rows, wanted: int, made: int | None) -> None:
        uid = rows.uid
        wrong = ""
        if rows.count != wanted:
            wrong = f"{rows.count} rows came, and {wanted} are due"
        elif rows.count and bool((np.diff(uid) <= 0).any()):
            wrong = "a row came twice, or rows changed places"
        elif rows.count and made and (int(uid[0]) // made, int(uid[-1]) // made) != (number, number):
            wrong = f"samples {int(uid[0])} to {int(uid[-1])} came, and those from {number * made} on are due"
        if wrong:
            raise RunFailure(
                "RLF5058",
                f"batch {number} of the queue `{queue.id}` is not what was put: {wrong}",
                stage=queue.stage,
                help=("report this: a queue hands every row on exactly once, in order",),
            )

    def _queue(self, name: str) -> Queue:
        return next(queue for queue in self.plan.queues if queue.id == name)

    def _end(self, queue: Queue) -> DistQueue:
        """The worker's end of a queue."""
        if queue.id not in self._opened:
            sizes, limit = self.sizes, float(self.plan.collective_timeout_s)
            spec = edge_of(queue, sizes[queue.source], sizes[queue.target], limit)
            self._opened[queue.id] = self.open_end(spec, self.actors[queue.id], self.pool, self.ranks.start)
        return self._opened[queue.id]


def _needed(total: int, ranks: int, low: int, high: int) -> list[tuple[int, int, int]]:
    """(part, first, last + 1 row of it in the batch) of the parts that have some of the rows [low, high); at least
    one, whose columns say what none of them looks like."""
    found = [(part, *bounds(total, ranks, part)) for part in range(ranks)]
    return [one for one in found if one[1] < high and low < one[2]] or found[:1]
