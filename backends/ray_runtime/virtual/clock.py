"""The time of a virtual run: that of the plan, which passes `speed_up` times as fast as this machine's."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median


class Clock:
    """Times are seconds of the plan since the epoch; both clocks show the same at `epoch`, one for all workers."""

    def __init__(
        self,
        speed_up: float,
        epoch: float,
        real: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.speed_up, self._epoch, self._real, self._sleep = speed_up, epoch, real, sleep
        self.slept = 0.0
        """Real seconds that were asked for and are over."""

    def now(self) -> float:
        return self._epoch + (self._real() - self._epoch) * self.speed_up

    def real(self) -> float:
        """Seconds of this machine since its epoch."""
        return self._real()

    def sleep_until(self, then: float) -> None:
        """Nothing when `then` is past. What is done between now and before the call is a part of the sleep."""
        left = (then - self.now()) / self.speed_up
        if left > 0:
            self._sleep(left)
            self.slept += left


def overshoot(tries: int = 9, asked: float = 0.001) -> float:
    """Seconds by which this machine oversleeps: the median of some sleeps of `asked` seconds."""
    found = []
    for _ in range(tries):
        started = time.perf_counter()
        time.sleep(asked)
        found.append(time.perf_counter() - started - asked)
    return max(median(found), 0.0)
