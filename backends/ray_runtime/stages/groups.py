"""Groups whose samples lie on several ranks: what is compared within a group is exchanged, and ranks keep their rows.

Every rank computes on the rows of the whole step in the order that they have on one rank, so that every number is the
one that it would be there, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.stages.call import Call


@dataclass(frozen=True)
class Whole:
    """Columns over all samples of the groups that this rank has samples of, and which of these are its own."""

    columns: dict[str, np.ndarray]
    own: slice
    counts: bool
    """Whether this rank is the one that counts groups in a metric."""

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]


def whole_groups(call: Call, rows: Batch, **columns: np.ndarray) -> Whole:
    """`columns` [rows] of whole groups: as they are, or where ranks share groups those of all ranks, in rank order.

    Numbers travel as float64, which holds every float32 and every int below 2**53. All ranks must call.
    """
    if rows.share is None:
        return Whole(columns, slice(None), True)
    counts = call.over_ranks([float(rows.rows)])[:, 0].astype(np.int64)
    if len(counts) != rows.share.ranks:
        raise ValueError(f"{rows.share.ranks} ranks share groups, and {len(counts)} are connected")
    longest, rank = int(counts.max()), rows.share.rank
    sent = np.full((len(columns), longest), np.nan)
    for line, column in zip(sent, columns.values(), strict=True):
        line[: rows.rows] = column
    received = call.over_ranks(sent.reshape(-1).tolist()).reshape(len(counts), len(columns), longest)
    found = {
        name: np.concatenate([part[index, :count] for part, count in zip(received, counts, strict=True)])
        for index, name in enumerate(columns)
    }
    first = int(counts[:rank].sum())
    typed = {name: found[name].astype(column.dtype) for name, column in columns.items()}
    return Whole(typed, slice(first, first + rows.rows), rank == 0)
