"""A set of numbers that are mostly neighbours, as ranges: which ids were seen, in little memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class IdSet:
    """Integers in ranges [start, end), sorted and apart. `add` and `in` cost O(log ranges) when ids rise."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            if start >= end or (self._ends and start <= self._ends[-1]):
                raise ValueError(f"range {start} to {end} is empty or not after the one before")
            self._starts.append(start)
            self._ends.append(end)

    def __contains__(self, id: int) -> bool:
        k = bisect_right(self._starts, id) - 1
        return k >= 0 and id < self._ends[k]

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._starts)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self._starts, self._ends, strict=True))

    def add(self, id: int) -> bool:
        """False where it was in the set already."""
        k = bisect_right(self._starts, id) - 1
        if k >= 0 and id < self._ends[k]:
            return False
        joins_left = k >= 0 and self._ends[k] == id
        joins_right = k + 1 < len(self._starts) and self._starts[k + 1] == id + 1
        if joins_left and joins_right:
            self._ends[k] = self._ends.pop(k + 1)
            del self._starts[k + 1]
        elif joins_left:
            self._ends[k] = id + 1
        elif joins_right:
            self._starts[k + 1] = id
        else:
            self._starts.insert(k + 1, id)
            self._ends.insert(k + 1, id + 1)
        return True

    def first_missing(self) -> int:
        """The least number >= 0 that is not in the set."""
        return self._ends[0] if self._starts and self._starts[0] <= 0 else 0
