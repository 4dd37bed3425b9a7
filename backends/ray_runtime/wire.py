"""How values travel between pools: as numpy arrays, which Ray reads out of its object store without a copy.

Nothing is padded: a ragged column is its values and its offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from rlflow.backends.ray_runtime.batch import Batch, Column, Packed, Share
from rlflow.backends.ray_runtime.dist_queue.columns import Field, Ragged

CONTEXT = ("uid", "group", "sample", "round", "mask", "response_ids")
"""Columns of the rows that a column belongs to which its readers may ask for."""

Segment: TypeAlias = tuple[int, int, int]
"""(part, first row, last row + 1): consecutive rows of one rank's part of a batch."""


@dataclass(frozen=True)
class Message:
    """One rank's part of a value: rows, or a column with, where the reader has not got them, the rows it belongs to."""

    rows: int
    columns: dict[str, Field]
    """By name; `""` is the column itself where the value is one."""
    share: Share | None = None


def packed_message(value: Batch | np.ndarray | Packed, rows: Batch | None = None) -> Message:
    """A value as a message; `rows`: what a column belongs to, sent along."""
    if isinstance(value, Batch):
        return Message(value.rows, {name: _sent(column) for name, column in value.columns.items()}, value.share)
    columns: dict[str, Field] = {"": _sent(value)}
    if rows is not None:
        columns |= {name: _sent(rows.columns[name]) for name in CONTEXT if name in rows.columns}
    count = value.rows if isinstance(value, Packed) else len(value)
    return Message(count, columns, None if rows is None else rows.share)


def joined(messages: Sequence[Message | None], segments: Sequence[Segment]) -> dict[str, Column]:
    """The columns of some rows, in the order of the segments; `messages` of parts that no segment names may be None.

    Without a segment: columns without rows, of the first message there is.
    """
    first = next(message for message in messages if message is not None)
    found: dict[str, Column] = {}
    for name, like in first.columns.items():
        parts = [(messages[part], low, high) for part, low, high in segments]
        cut = [_rows(message.columns[name], low, high) for message, low, high in parts if message is not None]
        found[name] = _concatenated(cut or [_rows(like, 0, 0)])
    return found


def _sent(column: Column) -> Field:
    if isinstance(column, Packed):
        return Ragged(column.values.numpy(), column.offsets.numpy())
    return column


def _rows(column: Any, low: int, high: int) -> Any:
    """Rows [low, high) of a sent column; offsets then count from 0."""
    if isinstance(column, tuple):
        values, offsets = column
        return values[offsets[low] : offsets[high]], offsets[low : high + 1] - offsets[low]
    return column[low:high]


def _concatenated(parts: list[Any]) -> Column:
    if isinstance(parts[0], tuple):
        # Arrays out of the object store may not be written to; concatenation copies them.
        values = torch.from_numpy(np.concatenate([values for values, _ in parts]))
        lengths = np.concatenate([np.diff(offsets) for _, offsets in parts])
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(torch.from_numpy(lengths.astype(np.int64)), 0, out=offsets[1:])
        return Packed(values, offsets)
    if isinstance(parts[0], list):
        return [item for part in parts for item in part]
    return np.concatenate(parts)
