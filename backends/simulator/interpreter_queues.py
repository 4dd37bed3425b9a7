"""The queues between pools, by batches. Which batch may enter, and which is complete, is decided by `QueueState`."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlflow.backends.simulator.clock import Clock, Process, Signal, Time, Wait
from rlflow.plan import Queue
from rlflow.protocol.queue import QueueState
from rlflow.protocol.queue_entries import Status

_ROWS = 2
"""A batch is a group of two rows: its first row, which reserves the places of all of it when the stage that makes it
starts, and the rest, put when that stage has ended."""


@dataclass(slots=True, eq=False)
class BatchQueue:
    """One queue of the plan. Batches are numbered by step; an evaluation's by how often it ran."""

    spec: Queue
    clock: Clock
    changed: Signal = field(default_factory=Signal)
    depths: list[tuple[Time, int]] = field(default_factory=lambda: [(0, 0)])
    """(time, batches from then on), from the reservation to the end of the last reader."""
    _state: QueueState = field(init=False)
    _held: dict[int, int] = field(default_factory=dict)
    """Batch to group, from the take to the end of the last reader."""

    def __post_init__(self) -> None:
        capacity = self.spec.capacity * _ROWS
        self._state = QueueState([self.spec.source], [self.spec.target], capacity=capacity, group=_ROWS)

    def reserve(self, batch: int) -> Process:
        """Places for a batch whose making starts; sleeps while the queue is full."""
        while not self._state.put(self.spec.source, [(batch * _ROWS, batch)]):
            yield Wait(self.changed, f"room in the queue {self.spec.id} ({self._state.describe()})")
        self._note(1)

    def fill(self, batch: int) -> None:
        """The batch is made."""
        self._state.put(self.spec.source, [(batch * _ROWS + 1, batch)])
        self.clock.fire(self.changed)

    def take(self, batch: int) -> Process:
        """The next batch, as soon as it is complete."""
        while True:
            taken = self._state.take(self.spec.target, _ROWS)
            if taken.status is Status.ROWS:
                break
            yield Wait(self.changed, f"batch {batch} of the queue {self.spec.id}")
        (self._held[batch],) = taken.groups

    def release(self, batch: int) -> None:
        """Its last reader has ended."""
        self._state.done(self.spec.target, [self._held.pop(batch)])
        self._note(-1)
        self.clock.fire(self.changed)

    def _note(self, more: int) -> None:
        self.depths.append((self.clock.now, self.depths[-1][1] + more))
