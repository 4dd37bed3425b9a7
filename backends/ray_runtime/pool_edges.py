"""A rank's end of the queues between pools: putting its part of a value, taking its rows of another pool's.

A batch is read once per model-parallel replica, as the plan says: the first rank of each block of ranks reads the parts
that the block needs, and hands every rank of the block its rows.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.dist_queue.client import DistQueue
from rlflow.backends.ray_runtime.dist_queue.columns import rows as rows_in
from rlflow.backends.ray_runtime.dist_queue.edges import edge_of, readers_of
from rlflow.backends.ray_runtime.dist_queue.rows import RowFacts
from rlflow.backends.ray_runtime.row_stages import needs_rows, rows_root
from rlflow.backends.ray_runtime.splitting import Layout, Split, layout_of, regrouped, split
from rlflow.backends.ray_runtime.stages.call import Frame
from rlflow.backends.ray_runtime.wire import Message, joined, packed_message
from rlflow.backends.ray_runtime.world import World
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import Plan, PutRows, Queue, TakeRows


@dataclass(frozen=True)
class Sent:
    """What readers learn of one part without reading it; as bytes, for the queue's actor has no torch."""

    layout: Layout | None
    """None for a column whose rows the reader has."""
    origin: list[Split] | None
    """Of a column without its rows: how these were dealt out over the ranks that made it; None = they made the rows.
    Only the first part of a batch says so: it is as long as there are ranks."""
    cursors: dict[str, int]
    """Rows taken from every data set when the part was put."""


@dataclass
class PoolEdges:
    """All queues of this rank. `cursors` is the rank's own; what arrives moves it on."""

    plan: Plan
    world: World
    cursors: dict[str, int]
    _put: dict[str, int] = field(default_factory=dict)
    _ends: dict[str, DistQueue] = field(default_factory=dict)
    _blocks: dict[int, dist.ProcessGroup | None] = field(default_factory=dict)

    def connect(self) -> None:
        """Make the groups of the blocks that read together. All ranks of the pool call."""
        for queue in self.plan.queues:
            if queue.target == self.world.pool:
                size = self.world.size // self._reads(queue)
                if size not in self._blocks:
                    start = self.world.rank // size * size
                    ranks = self.world.ranks(self.world.pool)[start : start + size]
                    self._blocks[size] = self.world.between(ranks, "read") if size > 1 else None

    def put(self, instruction: PutRows, frame: Frame) -> int:
        """Put this rank's part of a value; waits while the queue is full. Returns bytes."""
        queue = self._queue(instruction.queue)
        value = frame.values[instruction.stage]
        rows = frame.rows.get(instruction.stage)
        alone = needs_rows(self.plan, queue)
        assert isinstance(value, Batch | np.ndarray | Packed)
        assert isinstance(value, Batch) or rows is not None
        message = packed_message(value, rows if alone else None)
        layout = layout_of(value if isinstance(value, Batch) else rows) if isinstance(value, Batch) or alone else None  # type: ignore[arg-type]
        number = self._put[queue.id] = self._put.get(queue.id, -1) + 1
        origin = None if layout is not None else frame.splits.get(rows_root(self.plan, instruction.stage))
        rank, parts = self.world.rank, self.world.size
        note = pickle.dumps(Sent(layout, None if rank else origin, dict(self.cursors)))
        facts = RowFacts((number * parts + rank,), (number,), notes=(note,), spans=((0, message.rows),))
        return self._end(queue).put(f"rank {rank}", facts, message.columns)

    def take(self, instruction: TakeRows, frame: Frame) -> int | None:
        """This rank's rows of the queue's next batch, into the frame.

        Batches that the queue held, this one among them; None on ranks that another rank reads for.
        """
        queue = self._queue(instruction.queue)
        stage = self.plan.stage(instruction.stage)
        reads = self._reads(queue)
        size = self.world.size // reads
        reader, place = divmod(self.world.rank, size)
        known = frame.splits.get(rows_root(self.plan, stage.id))
        mine: list[Any] = [None]
        shares: list[Any] | None = None
        depth: int | None = None
        if place == 0:
            try:
                shares, depth = self._read(queue, reader, size, known)
            except RunFailure as failure:
                shares = [failure] * size  # the others wait for their rows: they must hear it too
        group = self._blocks.get(size)
        if group is None:
            assert shares is not None
            mine = shares
        else:
            dist.scatter_object_list(mine, shares, group=group, group_src=0)
        found = mine[0]
        if isinstance(found, RunFailure):
            raise found
        columns, rows, cut, cursors = found
        for name, cursor in cursors.items():
            self.cursors[name] = max(cursor, self.cursors.get(name, 0))
        if "" not in columns:
            batch = Batch(rows.count, columns, rows.share)
            frame.values[stage.id] = frame.rows[stage.id] = batch
            frame.splits[stage.id] = cut
            return depth
        frame.values[stage.id] = columns.pop("")
        root = rows_root(self.plan, stage.id)
        frame.rows[stage.id] = Batch(rows.count, columns, rows.share) if rows.there else frame.rows[root]
        return depth

    # --- inside ------------------------------------------------------------------------------------------------------

    def _read(self, queue: Queue, reader: int, size: int, known: list[Split] | None) -> tuple[list[Any], int]:
        """For every rank of the block its columns, number of rows, how the batch is split, cursors; and the depth."""
        end = self._end(queue)
        reading = end.take(f"reader {reader}", end.spec.group)
        parts: list[Sent] = [pickle.loads(note) for note in reading.facts.notes]
        cut = None if parts[0].layout is not None else regrouped(known, parts[0].origin, self.world.size)
        layouts = [part.layout for part in parts if part.layout is not None]
        if layouts:
            if len(layouts) != self.world.size and any(part.share and not part.grouped for part in layouts):
                raise RunFailure(
                    "RLF4003",
                    f"{len(layouts)} ranks share the prompts of `{queue.stage}`, and pool `{queue.target}` has "
                    f"{self.world.size} ranks",
                    help=("take a number of prompts that the ranks divide",),
                )
            cut = split(layouts, self.world.size)
        assert cut is not None
        own = cut[reader * size : (reader + 1) * size]
        needed = {part for one in own for part, _, _ in one.segments} or {0}
        reading.load(needed)
        messages: list[Message | None] = [None] * len(parts)
        for place in needed:
            fields = reading.columns([place])
            messages[place] = Message(min(map(rows_in, fields.values()), default=0), fields)
        cursors: dict[str, int] = {}
        for part in parts:
            for name, cursor in part.cursors.items():
                cursors[name] = max(cursor, cursors.get(name, 0))
        found = []
        for one in own:
            columns = joined(messages, one.segments)
            rows = sum(high - low for _, low, high in one.segments)
            if layouts:
                if one.groups is not None:
                    columns["group"] = one.groups
                if one.renumbered:
                    columns.pop("round", None)
            found.append((columns, Rows(rows, one.share, bool(layouts)), cut, cursors))
        end.done(f"reader {reader}", reading.groups)
        return found, reading.depth

    def _queue(self, name: str) -> Queue:
        return next(queue for queue in self.plan.queues if queue.id == name)

    def _reads(self, queue: Queue) -> int:
        """Readers of a batch: as many as the plan says, where these are blocks of equal size."""
        return readers_of(queue, self.world.size)

    def _end(self, queue: Queue) -> DistQueue:
        """This rank's end of a queue."""
        if queue.id not in self._ends:
            pools, limit = self.world.pools, self.world.timeout.total_seconds()
            spec = edge_of(queue, pools[queue.source], pools[queue.target], limit)
            self._ends[queue.id] = DistQueue(spec, self.world.queues[queue.id], self.world.pool, self.world.rank)
        return self._ends[queue.id]


@dataclass(frozen=True)
class Rows:
    """What a rank got: number of rows, which are shared, and whether they came along."""

    count: int
    share: Any
    there: bool
