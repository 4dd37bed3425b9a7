"""What the pools of one run must agree on: after which step to stop, and when a checkpoint is whole.

Pools are at different steps when a stop is asked for, so that nobody can decide alone: the run ends after the latest
step that any pool has begun, and the others go on to it.
"""

from __future__ import annotations

import threading


class RunControl:
    """An actor with one call per pool and step."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        """Of a checkpoint."""
        self._begun = 0
        self._last: int | None = None
        self._saved: dict[int, int] = {}

    def begin(self, step: int) -> bool:
        """Whether a pool may begin this step; the same answer for all pools."""
        if self._last is not None and step > self._last:
            return False
        self._begun = max(self._begun, step)
        return True

    def stop(self) -> None:
        """Begin no further step."""
        if self._last is None:
            self._last = self._begun

    def saved(self, step: int) -> bool:
        """A part of a checkpoint is written; whether it was the last part."""
        parts = self._saved.pop(step, 0) + 1
        if parts < self._parts:
            self._saved[step] = parts
        return parts >= self._parts

    def ended(self) -> None:
        """Never returns (in the concurrency group `watch`): who holds the reference hears of the actor's death."""
        threading.Event().wait()
