"""The queues of a plan: a batch is a group, and a row of it is what one rank of the source makes of the batch."""

from __future__ import annotations

from rlflow.backends.ray_runtime.dist_queue.rows import EdgeSpec
from rlflow.plan import Queue


def readers_of(queue: Queue, ranks: int) -> int:
    """Readers of a batch in a pool of so many ranks: as many as the plan says, where these are blocks of equal size."""
    return queue.reads if ranks % queue.reads == 0 else ranks


def edge_of(queue: Queue, parts: int, ranks: int, deadline_s: float) -> EdgeSpec:
    """`parts` ranks of the source put, `ranks` ranks of the target read: one of each block for all of it."""
    return EdgeSpec(
        queue.id,
        producers=tuple(f"rank {part}" for part in range(parts)),
        consumers={f"reader {reader}": None for reader in range(readers_of(queue, ranks))},
        capacity=queue.capacity * parts,
        group=parts,
        deadline_s=deadline_s,
    )
