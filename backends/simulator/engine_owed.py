"""Tokens that running requests are still expected to generate, kept without looking at each of them."""

from __future__ import annotations

from heapq import heappop, heappush

from rlflow.backends.simulator.engine_job import Job


class Owed:
    """The sum of max(0, expected - generated) over the running requests of a rank.

    Those that decode all generate one token a step, until they have as many as expected: these moments are kept in a
    heap. Offsets are the rank's.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._total = 0
        self._paying = 0
        """Decoding requests that have fewer than expected."""
        self._ends: list[tuple[int, int, Job]] = []
        """(offset at which it has as many, ticket, request). Void once the request has another ticket."""

    def with_(self, generated: int) -> int:
        """The sum with a request more, which has generated so many."""
        return self._total + max(0, self._expected - generated)

    def enter(self, generated: int) -> None:
        """A request is admitted."""
        self._total += max(0, self._expected - generated)

    def begin(self, job: Job, offset: int) -> None:
        """It decodes from `offset` on."""
        left = self._expected - job.generated
        if left > 0:
            self._paying += 1
            heappush(self._ends, (offset + left, job.ticket, job))

    def advance(self, steps: int, offset: int) -> None:
        """Decoding went on for so many steps, to `offset`."""
        self._total -= self._paying * steps
        ends = self._ends
        while ends and ends[0][0] <= offset:
            end, ticket, job = heappop(ends)
            if job.ticket == ticket:
                self._paying -= 1
                self._total += offset - end  # it generated more than was expected

    def halt(self, job: Job, offset: int) -> None:
        """It stops decoding; its ticket and its `generated` are still the old ones."""
        self._paying -= job.generated + offset - job.joined < self._expected

    def leave(self, generated: int) -> None:
        """It runs no more."""
        self._total -= max(0, self._expected - generated)
