"""The data cursor: which prompts were handed out and have not ended. After a resume each ends exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.idset import IdSet


class DataCursor:
    """Prompts by position in the data order, from 0 over all epochs.

    A prompt that ended, trained or dropped, is never handed out again and pins nothing; one that was handed out and not
    ended comes first after a resume, in the old order, so that slow prompts are not lost.
    """

    def __init__(self) -> None:
        self._again: list[int] = []
        """To be handed out before anything new, in order."""
        self._out: dict[int, None] = {}
        self._ended = IdSet()
        self._next = 0
        self.ends: Counter[str] = Counter()
        """How many ended in which way."""

    @property
    def next_new(self) -> int:
        """The first position that was never handed out."""
        return self._next

    @property
    def settled(self) -> int:
        """Everything before this position has ended."""
        return self._ended.first_missing()

    @property
    def out(self) -> tuple[int, ...]:
        """Handed out and not ended, in the order in which they were handed out."""
        return tuple(self._out)

    def issue(self, available: int | None = None) -> int | None:
        """The next prompt; None at the end of `available` prompts."""
        if self._again:
            position = self._again.pop(0)
        elif available is not None and self._next >= available:
            return None
        else:
            position, self._next = self._next, self._next + 1
        self._out[position] = None
        return position

    def end(self, position: int, how: str) -> None:
        """`trained`, or a reason for dropping it. Raises `ProtocolError` for a prompt that is not out."""
        self._take_back(position)
        self._ended.add(position)
        self.ends[how] += 1

    def retry(self, position: int) -> None:
        """It is to be handed out again, before new ones and after those that wait already."""
        self._take_back(position)
        self._again.append(position)

    def _take_back(self, position: int) -> None:
        if position not in self._out:
            raise ProtocolError(f"prompt {position} is not out: it was never handed out, or has ended")
        del self._out[position]

    def to_json(self) -> dict[str, Any]:
        """At a resume what is out counts as not handed out: it comes again, in the order of the data."""
        return {
            "again": sorted([*self._again, *self._out]),
            "ended": [list(part) for part in self._ended.ranges],
            "next": self._next,
            "ends": dict(sorted(self.ends.items())),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DataCursor:
        cursor = cls()
        cursor._again = list(data["again"])
        cursor._ended = IdSet((start, end) for start, end in data["ended"])
        cursor._next = data["next"]
        cursor.ends = Counter(data["ends"])
        return cursor
