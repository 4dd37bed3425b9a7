"""The values of a queue: what a take answers, and a group of rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    ROWS = "rows"
    WAIT = "wait"
    """Not enough yet. An empty queue is not the end of the data."""
    END = "end"
    """All producers closed and this consumer has had everything."""
    FAILED = "failed"
    """A producer died; `QueueState.failure` says how."""


@dataclass(frozen=True, slots=True)
class Taken:
    status: Status
    groups: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    """Of the groups, in their order."""


@dataclass(slots=True)
class QueueGroup:
    """A group of rows that holds its places in the queue from its first row until it is freed."""

    rows: list[int] = field(default_factory=list)
    lost: int = 0
    """Rows that will not come: the group is short."""
    number: int | None = None
    """Rises in the order in which groups became complete; None: rows are missing."""
    readers: dict[str, str] = field(default_factory=dict)
    """Consumers that hold it, with the reader."""
    done: set[str] = field(default_factory=set)
    """Consumers that have read it."""
    fields: Counter[str] = field(default_factory=Counter)
    """Rows that have each field which a consumer waits for."""
