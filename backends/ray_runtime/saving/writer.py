"""The thread that writes checkpoints while training goes on. One at a time: the next waits for the one before."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from rlflow.diagnostics.diagnostic import RunFailure

Job = Callable[[], bool]
"""Writes; whether a checkpoint is whole now."""


class Writer:
    """Of one rank. What a job raises comes out of the next call."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.published = 0
        """The newest checkpoint that this rank has put into its place; 0 = none."""

    def submit(self, step: int, job: Job) -> None:
        """Write, beside what the caller does next, as soon as the one before is written. Waits for that."""
        self.settle()
        self._idle.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
            self._thread.start()
        self._jobs.put((step, job))

    def check(self) -> None:
        """Raise what went wrong, if something has."""
        if self._failure is not None:
            raise self._failure

    def settle(self) -> None:
        """Wait until everything is written."""
        self._idle.wait()
        self.check()

    def wait(self, seconds: float) -> None:
        """Wait until everything is written, but no longer; nothing is raised."""
        self._idle.wait(seconds)

    def close(self) -> None:
        """Wait, and end the thread; what went wrong is raised."""
        try:
            self.settle()
        finally:
            if self._thread is not None:
                self._jobs.put(None)
                self._thread.join()
                self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            step, write = job
            try:
                if write():
                    self.published = step
            except RunFailure as failure:
                self._failure = failure
            except Exception as error:
                self._failure = RunFailure(
                    "RLF5010",
                    f"the checkpoint of step {step} cannot be written",
                    notes=("earlier checkpoints are untouched", f"{type(error).__name__}: {error}"),
                )
            finally:
                self._idle.set()
