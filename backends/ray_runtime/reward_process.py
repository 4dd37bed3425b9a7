"""Scoring samples in processes of their own, so that user code can be slow, hang or crash without taking a run along.

A hanging function is stopped in two ways. Python code that waits or loops is given up by `attempt`, which reports
RLF5004; the pool then ends the process. Code that never lets go of the interpreter lock (a regular expression that
backtracks for ever) would stop that very report, so a watchdog of the C library ends the process one second later and
leaves the place in the code in the worker's mark file, from which the pool makes the same RLF5004.

With `on_error = drop` a sample that hangs is dropped, and a new process goes on with the rest.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlflow.backends.ray_runtime.rewards import Attempt, RewardFunction, Sample, Unit, attempt, load_reward
from rlflow.backends.ray_runtime.run_logs import doing, log_to
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import DataSource, RewardSource

WATCHDOG_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the pool needs to know of the reward a worker has loaded."""

    name: str
    batched: bool
    wants_tokens: bool


class RewardWorker:
    """One loaded reward; made into a Ray actor by `RewardPool`. Failures are returned, so that Ray adds nothing."""

    def __init__(
        self,
        source: RewardSource,
        base_dir: str,
        data: Mapping[str, DataSource],
        mark: str,
        log: str = "",
        who: str = "",
    ) -> None:
        """`log`: the file for what the function prints, told to come from `who`; empty = where Ray puts it."""
        if log:
            log_to(Path(log), who)
        self._source = source
        self._base_dir = Path(base_dir)
        self._data = data
        self._mark = Path(mark)
        self._armed_at = 0.0
        self._function: RewardFunction | None = None

    def load(self) -> Loaded | RunFailure:
        try:
            self._function = load_reward(self._source, self._base_dir, self._data)
        except RunFailure as failure:
            return failure
        self._mark.parent.mkdir(parents=True, exist_ok=True)  # another host than the pool's has no such folder yet
        self._mark_file = self._mark.open("w+b", buffering=0)
        return Loaded(self._function.name, self._function.batched, self._function.wants_tokens)

    def score(self, samples: list[Sample], units: list[Unit]) -> Attempt | RunFailure:
        """After RLF5004, or where the attempt says that something hangs, a call is still running here: end it."""
        function = self._function
        assert function is not None, "score before load"
        timeout = self._source.timeout_us / 1e6
        longest = max((last - first for first, last in units), default=1)
        limit = timeout * longest + WATCHDOG_GRACE_S

        def on_start(unit: Unit) -> None:
            first = samples[unit[0]]
            several = "" if unit[1] - unit[0] == 1 else f"{unit[1] - unit[0]} samples from "
            doing(f"{several}sample {first.index} of the prompt with uid {first.uid}")
            self._mark_file.seek(0)
            self._mark_file.write(b"%9d\n" % unit[0])
            # Arming starts a thread, so fast functions share one; it still fires only after `timeout`.
            if time.monotonic() - self._armed_at > WATCHDOG_GRACE_S / 2:
                faulthandler.dump_traceback_later(limit, exit=True, file=self._mark_file)
                self._armed_at = time.monotonic()

        source = self._source
        try:
            found = attempt(function, samples, units, source.retries, timeout, source.on_error, on_start)
            found.ended = time.time()
            return found
        except RunFailure as failure:
            return failure
        finally:
            doing("")
            faulthandler.cancel_dump_traceback_later()
            self._armed_at = 0.0
