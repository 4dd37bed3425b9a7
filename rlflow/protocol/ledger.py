"""Where the credits are: free + running + queued + training + syncing = (bound + 1) * batch, at any time.

The place invariant of the cycle train, sync, generate, train (for marked graphs: Commoner, Holt, Even,
Pnueli 1971). A sample that leaves without returning its credit breaks it and ends in deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from rlflow.protocol.errors import ProtocolError


class Place(StrEnum):
    FREE = "free"
    RUNNING = "running"
    """Admitted and not finished, with a slot or waiting for one."""
    QUEUED = "queued"
    """Finished (or lost by a group that goes on short), not taken by a step."""
    TRAINING = "training"
    SYNCING = "syncing"
    """Trained, the version not yet published."""


class Ledger:
    """Credits by place, double entry: what leaves one place enters another."""

    def __init__(self, total: int, credits: Mapping[Place, int] | None = None) -> None:
        self.total = total
        self.credits = dict.fromkeys(Place, 0)
        self.credits[Place.FREE] = total
        for place, count in (credits or {}).items():
            self.credits[place] = count

    def move(self, source: Place, to: Place, credits: int) -> None:
        """Raises `ProtocolError` where the source has fewer: a credit used or returned twice."""
        if credits < 0 or credits > self.credits[source]:
            raise ProtocolError(f"{credits} credits from {source} to {to}, but {source} has {self.credits[source]}")
        self.credits[source] -= credits
        self.credits[to] += credits

    def resize(self, total: int) -> None:
        """The bound or the batches changed. Free credits may become negative: so many are out too much."""
        self.credits[Place.FREE] += total - self.total
        self.total = total

    def check(self, counted: Mapping[Place, int]) -> None:
        """Raises `ProtocolError` unless the entries sum to the total and equal what was counted, place by place."""
        if sum(self.credits.values()) != self.total:
            raise ProtocolError(f"credits {_text(self.credits)} sum to {sum(self.credits.values())}, not {self.total}")
        for place, count in counted.items():
            if self.credits[place] != count:
                raise ProtocolError(f"{self.credits[place]} credits are {place}, but {count} were counted there")

    def __str__(self) -> str:
        return f"{_text(self.credits)} = {self.total}"


def _text(credits: Mapping[Place, int]) -> str:
    return " + ".join(f"{count} {place}" for place, count in credits.items())
