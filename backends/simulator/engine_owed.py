"""Blocks that running requests are still expected to take, kept without looking at each of them."""

from __future__ import annotations

from heapq import heappop, heappush

from rlflow.backends.simulator.engine_blocks import taken
from rlflow.backends.simulator.engine_job import Job


class Owed:
    """The sum over the running requests of a rank of what a response of the expected length needs beyond what is there.

    A request has the blocks of its context and its next token. Those that decode take blocks at known offsets of the
    rank until they have as many as expected; the offsets at which that happens are kept in a heap.
    """

    def __init__(self, expected: int, block: int) -> None:
        self._expected = expected
        self._block = block
        self.blocks = 0
        self._paying = 0
        """Decoding requests that have fewer than expected."""
        self._phases = [0] * block
        """Of these, as those of the rank."""
        self._ends: list[tuple[int, int, Job]] = []
        """(offset at which it has as many, ticket, request). Void once the request has another ticket."""

    def of(self, job: Job, generated: int) -> int:
        """Of a request that has generated so many tokens."""
        expected = -(-(job.prompt + self._expected) // self._block)
        return max(0, expected - (job.prompt + generated) // self._block - 1)

    def enter(self, job: Job) -> None:
        """A request is admitted."""
        self.blocks += self.of(job, job.generated)

    def begin(self, job: Job, offset: int) -> None:
        """It decodes from `offset` on."""
        left = self.of(job, job.generated)
        if left > 0:
            self._paying += 1
            self._phases[job.phase] += 1
            first = self._block - (job.prompt + job.generated) % self._block
            heappush(self._ends, (offset + first + (left - 1) * self._block, job.ticket, job))

    def advance(self, steps: int, offset: int) -> None:
        """Decoding went on for so many steps, to `offset`."""
        if self._paying:
            self.blocks -= taken(self._phases, self._paying, offset - steps, steps)
        ends = self._ends
        while ends and ends[0][0] <= offset:
            end, ticket, job = heappop(ends)
            if job.ticket == ticket:
                self._paying -= 1
                self._phases[job.phase] -= 1
                self.blocks += (offset - end) // self._block  # taken beyond what was expected

    def halt(self, job: Job, offset: int) -> None:
        """It stops decoding; its ticket and its `generated` are still the old ones."""
        if self.of(job, job.generated + offset - job.joined):
            self._paying -= 1
            self._phases[job.phase] -= 1

    def leave(self, job: Job) -> None:
        """It runs no more."""
        self.blocks -= self.of(job, job.generated)
