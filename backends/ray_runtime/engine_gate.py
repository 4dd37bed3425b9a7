"""When an engine may generate, and when its weights may be touched: one generating thread, one that controls it.

The ranks of a replica sample in step, so they must also stop in step. The first rank decides: it enters a call when it
is not paused, and the others enter when they hear that it has; it stops at a token, and the others at the same one.
A pause is told to every rank; each one's `pause` returns when its own generation has stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlflow.backends.ray_runtime.engine import PauseMode
from rlflow.backends.ray_runtime.replica import Replica
from rlflow.diagnostics.diagnostic import RunFailure

GO_ON = 0
ENOUGH = -1
GIVE = -2
"""Signals at a token; a pause is 2 x its number, + 1 for `abort`."""


class Gate:
    """`wait_seconds` bounds every wait of one thread for the other (RLF5006)."""

    def __init__(self, replica: Replica, wait_seconds: float) -> None:
        self.wait_seconds = wait_seconds
        self.signal = GO_ON
        """What the generating thread is to do at the next token. Read without the lock."""
        self.cuts = 0
        """How often caches were dropped."""
        self._replica = replica
        self._changed = threading.Condition()
        self._entered = self._left = 0
        """Calls of generate on this rank"""
        self._held = False
        self._pauses = self._resumed = 0

    # --- the generating thread -------------------------------------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around one call of generate."""
        if self._replica.first:
            with self._changed:
                self._wait(lambda: not self.signal, "resume the paused engine")
                self._entered += 1
            self._replica.follow_first()
        else:
            self._replica.follow_first()
            with self._changed:
                self._entered += 1
        try:
            yield
        finally:
            with self._changed:
                self._left += 1
                self._changed.notify_all()

    def hold(self, signal: int) -> None:
        """Wait until pause number `signal` // 2 is over."""
        with self._changed:
            self._held = True
            self._changed.notify_all()
            try:
                self._wait(lambda: self._resumed >= signal // 2, "resume the paused engine")
            finally:
                self._held = False

    # --- the controlling thread ------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        with self._changed:
            if self.signal:
                raise refused("the engine is paused already", "resume it before it is paused again")
            self._pauses += 1
            number = 2 * self._pauses + (mode == "abort")
            if self._replica.first:
                self.signal = number
            entered = self._entered
        # Calls that the first rank entered before it was paused go on to their next token on every rank, and no others.
        entered = self._replica.tell_first(entered)
        with self._changed:
            self.signal = number
            self._wait(lambda: self._left >= entered or self._held, "stop at a token")

    def resume(self) -> None:
        with self._changed:
            if not self.signal:
                raise refused("resume of an engine that is not paused", "pause it first")
            self._resumed = self._pauses
            self.signal = GO_ON
            self._changed.notify_all()

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """Nothing is generated meanwhile; RLF5006 when something is."""
        with self._changed:
            if self._entered > self._left and not self._held:
                raise refused(f"{what} while samples are generated", "pause the engine first")
            yield

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(until, self.wait_seconds):
            raise RunFailure("RLF5006", f"the other thread of the rank did not {what} within {self.wait_seconds:g} s")


def refused(message: str, *help: str) -> RunFailure:
    """The engine's state does not allow a call."""
    return RunFailure("RLF5006", message, help=help)
