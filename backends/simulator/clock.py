"""Virtual time: a heap of what happens next, and processes that sleep and wait on it.

A process is a generator. It yields a number to sleep so long, or a `Wait` to sleep until a signal is fired. What
happens at one instant happens in the order in which it was asked for, so that a simulation repeats exactly.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass
from fractions import Fraction

Time = int | float | Fraction
"""Microseconds. Whole numbers stay exact."""


class Signal:
    """Wakes everything that waits for it."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[_Running] = []


@dataclass(frozen=True, slots=True)
class Wait:
    """Sleep until the signal is fired; `what` says for people what is missing."""

    signal: Signal
    what: str


Process = Generator[Time | Wait, None, None]


@dataclass(slots=True, eq=False)
class _Running:
    name: str
    process: Process
    waits_for: str = ""


class Clock:
    """`now` in microseconds from the start."""

    def __init__(self) -> None:
        self.now: Time = 0
        self._heap: list[tuple[Time, int, Callable[[], None]]] = []
        self._asked = 0
        self._alive: dict[int, _Running] = {}

    def at(self, time: Time, act: Callable[[], None]) -> None:
        """Call `act` at `time`, which is not in the past."""
        if time < self.now:
            raise ValueError(f"{time} is before {self.now}")
        heapq.heappush(self._heap, (time, self._asked, act))
        self._asked += 1

    def start(self, name: str, process: Process) -> None:
        """Begin a process at this instant."""
        running = _Running(name, process)
        self._alive[id(running)] = running
        self.at(self.now, lambda: self._go_on(running))

    def fire(self, signal: Signal) -> None:
        """Everything that waits for the signal goes on at this instant."""
        woken, signal.waiting = signal.waiting, []
        for running in woken:
            self._wake(running)

    def run(self) -> tuple[tuple[str, str], ...]:
        """Until nothing happens any more: the processes that have not ended, each with what it waits for."""
        while self._heap:
            self.now, _, act = heapq.heappop(self._heap)
            act()
        return tuple((running.name, running.waits_for) for running in self._alive.values())

    def _wake(self, running: _Running) -> None:
        self.at(self.now, lambda: self._go_on(running))

    def _go_on(self, running: _Running) -> None:
        running.waits_for = ""
        for asked in running.process:
            if isinstance(asked, Wait):
                running.waits_for = asked.what
                asked.signal.waiting.append(running)
                return
            if asked:
                self.at(self.now + asked, lambda: self._go_on(running))
                return
        del self._alive[id(running)]
