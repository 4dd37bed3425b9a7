"""Unions of half-open integer intervals: sorted, disjoint and not touching, so that equal sets are equal values."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]
"""[low, high)."""
Intervals = tuple[Interval, ...]


def normalise(intervals: Iterable[Interval]) -> Intervals:
    """Sorted and merged; empty intervals are dropped."""
    merged: list[Interval] = []
    for low, high in sorted(i for i in intervals if i[0] < i[1]):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def length(intervals: Intervals) -> int:
    return sum(high - low for low, high in intervals)


def union(a: Intervals, b: Intervals) -> Intervals:
    return normalise((*a, *b))


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Two pointers over sorted lists."""
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low < high:
            found.append((low, high))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def difference(a: Intervals, b: Intervals) -> Intervals:
    """What is in `a` and not in `b`."""
    left: list[Interval] = []
    j = 0
    for low, high in a:
        while j < len(b) and b[j][1] <= low:
            j += 1
        k = j
        while k < len(b) and b[k][0] < high:
            if low < b[k][0]:
                left.append((low, b[k][0]))
            low = max(low, b[k][1])
            k += 1
        if low < high:
            left.append((low, high))
    return tuple(left)


def contains(a: Intervals, b: Intervals) -> bool:
    """Whether `b` lies in `a`."""
    return intersection(a, b) == b
