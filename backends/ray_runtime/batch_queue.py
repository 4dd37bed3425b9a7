"""The actor of a queue between two pools. It holds references and small facts; the rows lie in Ray's object store.

A batch is complete when every rank of the source has put its part, and leaves when every reader of the target has read
it. What may enter, and who has read what, is decided by `rlflow.protocol.queue.QueueState`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlflow.plan import Queue
from rlflow.protocol.queue import QueueState
from rlflow.protocol.queue_entries import Status


@dataclass(frozen=True)
class QueueSettings:
    """`capacity` in batches; `parts` = ranks that put, `readers` = ranks that read."""

    id: str
    capacity: int
    parts: int
    readers: int
    deadline_s: float


def readers_of(queue: Queue, ranks: int) -> int:
    """Readers of a batch in a pool of so many ranks: as many as the plan says, where these are blocks of equal size."""
    return queue.reads if ranks % queue.reads == 0 else ranks


class QueueActor:
    """Calls wait for each other inside the actor; what waits longer than the deadline gets the reason as a text."""

    def __init__(self, settings: QueueSettings) -> None:
        self._settings = settings
        parts, readers = settings.parts, settings.readers
        self._state = QueueState(
            [f"rank {part}" for part in range(parts)],
            [f"reader {reader}" for reader in range(readers)],
            capacity=settings.capacity * parts,
            group=parts,
        )
        self._held: dict[int, list[Any]] = {}
        """Batch to its parts, (facts, [reference]) in rank order."""
        self._changed = asyncio.Condition()

    async def put(self, part: int, batch: int, sent: Any) -> str:
        """Add one rank's part of a batch; waits for room. Empty, or why it did not get it."""
        row = (batch * self._settings.parts + part, batch)

        def enter() -> bool:
            return self._state.put(f"rank {part}", [row])

        async with self._changed:
            if not await self._until(enter):
                return f"rank {part} found no room for batch {batch}: {self._state.describe()}"
            self._held.setdefault(batch, [None] * self._settings.parts)[part] = sent
            self._changed.notify_all()
        return ""

    async def take(self, reader: int) -> str | list[Any]:
        """The parts of the reader's next batch, in rank order; waits until it is complete. A text: why it did not."""
        taken: list[Any] = []

        def leave() -> bool:
            found = self._state.take(f"reader {reader}", self._settings.parts)
            if found.status is Status.ROWS:
                taken.extend(self._held[found.groups[0]])
            return found.status is Status.ROWS

        async with self._changed:
            if not await self._until(leave):
                return f"reader {reader} found no batch: {self._state.describe()}"
        return taken

    async def done(self, reader: int, batch: int) -> None:
        """The reader has copied the batch."""
        async with self._changed:
            if self._state.done(f"reader {reader}", [batch]):
                del self._held[batch]
            self._changed.notify_all()

    async def describe(self) -> str:
        """One line about what is there and who waits."""
        return self._state.describe()

    async def ended(self) -> None:
        """Never returns: who holds the reference hears of the actor's death."""
        await asyncio.Event().wait()

    async def _until(self, ready: Callable[[], bool]) -> bool:
        """Whether `ready` became true within the deadline. Holds the lock when it looks."""
        try:
            await asyncio.wait_for(self._changed.wait_for(ready), self._settings.deadline_s)
        except TimeoutError:
            return False
        return True
