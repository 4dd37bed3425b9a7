"""A worker's ends of the queues between pools: the calls of every rank that it stands for.

Each rank puts a part of its own, as in a run with devices, and each block of ranks that reads together takes once. What
comes is checked: every row once, in the order of the step that made it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlflow.backends.ray_runtime.batch_queue import readers_of
from rlflow.backends.ray_runtime.virtual.post import Call, Post
from rlflow.backends.ray_runtime.virtual.rows import Rows, bounds, joined
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import Plan, Queue


@dataclass(frozen=True)
class Held:
    """A worker's part of a value. `total` rows on all ranks of the pool, of which the first has the number `base`."""

    rows: Rows
    total: int
    base: int


@dataclass
class Ends:
    """Of one worker."""

    plan: Plan
    pool: str
    ranks: range
    """That the worker stands for."""
    sizes: dict[str, int]
    """Ranks of every pool."""
    actors: dict[str, Any]
    """Of the queues, by id."""
    post: Post
    _put: dict[str, int] = field(default_factory=dict)
    _taken: dict[str, int] = field(default_factory=dict)

    def put(self, queue_id: str, held: Held) -> None:
        """The part of every rank; waits while the queue is full. RunFailure RLF5019 after the plan's limit."""
        queue = self._queue(queue_id)
        number = self._put[queue_id] = self._put.get(queue_id, -1) + 1
        size = self.sizes[self.pool]
        first = bounds(held.total, size, self.ranks.start)[0]
        calls: list[Call] = []
        for rank in self.ranks:
            low, high = bounds(held.total, size, rank)
            reference = self.post.store(held.rows.part(low - first, high - first))
            sent = ((held.total, held.base), [reference])  # in a list, so that it stays a reference on its way
            calls.append(("put", self.actors[queue_id], (rank, number, sent)))
        for rank, problem in zip(self.ranks, self.post.ask(calls), strict=True):
            if problem:
                raise self._late(queue, f"rank {rank}", problem)

    def take(self, queue_id: str, made: int | None) -> Held:
        """The worker's rows of the queue's next batch.

        `made`: samples that a step makes, where the queue carries those of every step in order: what comes must then be
        rows of this very step. RunFailure RLF5019 after the plan's limit, RLF5058 for rows that are missing or doubled.
        """
        queue = self._queue(queue_id)
        number = self._taken[queue_id] = self._taken.get(queue_id, -1) + 1
        size = self.sizes[self.pool]
        readers = readers_of(queue, size)
        block = size // readers
        mine = [reader for reader in range(readers) if reader * block in self.ranks]
        actor = self.actors[queue_id]
        taken = self.post.ask([("take", actor, (reader,)) for reader in mine])
        blocks = []
        total = base = 0
        for reader, parts in zip(mine, taken, strict=True):
            if isinstance(parts, str):
                raise self._late(queue, f"rank {reader * block}", parts)
            (total, base), _ = parts[0]
            low = bounds(total, size, reader * block)[0]
            high = bounds(total, size, (reader + 1) * block - 1)[1]
            rows = self._read(parts, total, low, high)
            self._check(queue, number, rows, high - low, made)
            blocks.append(rows)
        self.post.ask([("done", actor, (reader, number)) for reader in mine])
        return Held(joined(blocks), total, base)

    def _read(self, parts: list[Any], total: int, low: int, high: int) -> Rows:
        """Rows [low, high) of a batch, from the parts that have some of them."""
        needed = []
        for part in range(len(parts)):
            begin, end = bounds(total, len(parts), part)
            if begin < high and low < end:
                needed.append((part, begin, end))
        needed = needed or [(0, *bounds(total, len(parts), 0))]
        fetched = self.post.fetch([parts[part][1][0] for part, _, _ in needed])
        return joined(
            [
                rows.part(max(low, begin) - begin, max(low, min(high, end)) - begin)
                for rows, (_, begin, end) in zip(fetched, needed, strict=True)
            ]
        )

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

    def _late(self, queue: Queue, who: str, problem: str) -> RunFailure:
        return RunFailure(
            "RLF5019",
            f"{who} of pool `{self.pool}` waited {self.plan.collective_timeout_s:g} s for the queue `{queue.id}`",
            notes=(problem,),
        )
