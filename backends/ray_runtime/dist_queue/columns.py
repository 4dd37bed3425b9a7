"""Fields as arrays: packed, cut into rows and put together again. Numpy alone, so that nothing is copied on reading.

A field is an array with an entry per row, a `Ragged` (entries per token), or a list (text, records).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np


class Ragged(NamedTuple):
    """Rows of different length, one after another: no padding. `offsets` int64 [rows + 1], the first is 0."""

    values: np.ndarray
    offsets: np.ndarray


class Pickled(NamedTuple):
    """A list on its way: the queue's actor need not know the classes in it."""

    data: bytes
    rows: int


Field: TypeAlias = "np.ndarray | Ragged | list[Any]"
Sent: TypeAlias = "np.ndarray | Ragged | Pickled"


def sent(column: Field) -> Sent:
    """A field as it travels."""
    if isinstance(column, list):
        return Pickled(pickle.dumps(column, protocol=5), len(column))
    if isinstance(column, Ragged):
        return Ragged(np.ascontiguousarray(column.values), column.offsets)
    return np.ascontiguousarray(column)


def opened(column: Sent) -> Field:
    """The field that was sent; lists are made anew, arrays are the ones of the object store, which may only be read."""
    return pickle.loads(column.data) if isinstance(column, Pickled) else column


def nbytes(column: Sent) -> int:
    """Bytes that travel."""
    if isinstance(column, Pickled):
        return len(column.data)
    return sum(part.nbytes for part in column) if isinstance(column, Ragged) else column.nbytes


def kind(column: Field | Sent) -> str:
    """What rows of a field must have in common: the form and the dtype."""
    if isinstance(column, Ragged):
        return f"{column.values.dtype} per token"
    return "objects" if isinstance(column, list | Pickled) else f"{column.dtype} per row"


def rows(column: Field | Sent) -> int:
    """Number of rows."""
    if isinstance(column, Ragged):
        return len(column.offsets) - 1
    return column.rows if isinstance(column, Pickled) else len(column)


def cut(column: Field, low: int, high: int) -> Field:
    """Rows [low, high), without a copy of arrays; offsets then count from 0."""
    if isinstance(column, Ragged):
        values, offsets = column
        first = offsets[low]
        part = offsets[low : high + 1]
        return Ragged(values[first : offsets[high]], part if first == 0 else part - first)
    return column[low:high]


def joined(parts: Sequence[Field]) -> Field:
    """The rows of all parts in order, at least one part, all of one kind. A single part is not copied."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Ragged):
        ragged = [part for part in parts if isinstance(part, Ragged)]
        lengths = np.concatenate([np.diff(part.offsets) for part in ragged])
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Ragged(np.concatenate([part.values for part in ragged]), offsets)
    if isinstance(first, list):
        return [item for part in parts for item in part]
    return np.concatenate([np.asarray(part) for part in parts])


def merged_runs(runs: np.ndarray) -> list[tuple[int, int, int]]:
    """Runs int64 [n, 3] of (source, low, high) with neighbours put together; empty ones are left out."""
    runs = runs[runs[:, 2] > runs[:, 1]]
    if not len(runs):
        return []
    goes_on = (runs[1:, 0] == runs[:-1, 0]) & (runs[1:, 1] == runs[:-1, 2])
    starts = np.flatnonzero(np.r_[True, ~goes_on])
    ends = np.r_[starts[1:], len(runs)] - 1
    table = np.stack([runs[starts, 0], runs[starts, 1], runs[ends, 2]], 1)
    return [(source, low, high) for source, low, high in table.tolist()]
