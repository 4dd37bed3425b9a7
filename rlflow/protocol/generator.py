"""Samples that run in slots, all at one speed: a virtual clock of tokens, exact between events."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

Time = int | Fraction | float


@dataclass(frozen=True, slots=True)
class _Run:
    number: int
    start: Time
    """Virtual time at which it got its slot."""
    tokens: int
    """Before that."""


class Generator:
    """Every running sample makes one token per `step_time(n)`, with n samples running.

    Virtual time counts the tokens that each sample running all the while has made (processor sharing as in Parekh,
    Gallager 1993). A sample that starts at virtual time o with k tokens ends at o + until - k whatever others do, so
    one heap gives the next end. Exact for integers and Fractions.
    """

    def __init__(self, step_time: Callable[[int], Time]) -> None:
        self._step_time = step_time
        self._now: Time = 0
        self._virtual: Time = 0
        self._runs: dict[int, _Run] = {}
        """By sample, in the order of starting."""
        self._ends: list[tuple[Time, int, int]] = []
        """Heap of (virtual end, sample, number of the run). Entries of stopped runs stay until they surface."""
        self._started = 0

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, sample: int) -> bool:
        return sample in self._runs

    @property
    def running(self) -> tuple[int, ...]:
        """In the order of starting."""
        return tuple(self._runs)

    def start(self, sample: int, tokens: int, until: int) -> None:
        """It has `tokens` already and runs until it has `until`."""
        self._runs[sample] = _Run(self._started, self._virtual, tokens)
        heapq.heappush(self._ends, (self._virtual + (until - tokens), sample, self._started))
        self._started += 1

    def stop(self, sample: int) -> int:
        """Takes it out; the whole tokens it has."""
        tokens = self.tokens(sample)
        del self._runs[sample]
        return tokens

    def tokens(self, sample: int) -> int:
        """Whole tokens that a running sample has."""
        run = self._runs[sample]
        return run.tokens + int(self._virtual - run.start)

    def next_end(self) -> Time | None:
        """When the next sample ends if nothing else happens; None: nothing runs."""
        self._drop_stopped()
        if not self._ends:
            return None
        return self._now + (self._ends[0][0] - self._virtual) * self._step_time(len(self._runs))

    def advance(self, now: Time) -> list[int]:
        """Moves to `now`, not past the next end. The samples that end now, by id; the caller stops each."""
        end = self.next_end()
        if end is not None and now >= end:
            self._virtual = self._ends[0][0]
        elif end is not None and now > self._now:
            passed = now - self._now
            step = self._step_time(len(self._runs))
            exact = not isinstance(passed, float) and not isinstance(step, float)
            self._virtual += Fraction(passed) / step if exact else passed / step
        self._now = now
        ended: list[int] = []
        while self._ends and self._ends[0][0] <= self._virtual:
            ended.append(heapq.heappop(self._ends)[1])
            self._drop_stopped()
        return sorted(ended)

    def _drop_stopped(self) -> None:
        while self._ends:
            _, sample, number = self._ends[0]
            run = self._runs.get(sample)
            if run is not None and run.number == number:
                return
            heapq.heappop(self._ends)
