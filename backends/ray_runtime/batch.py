"""What flows between stages at run time: rows with named columns, never padded.

A column is one of
  * `Packed`: a ragged per-token column, all rows' values one after another,
  * a numpy array with one entry per row,
  * a list with one entry per row (text, records).

Columns by name (dtype, per row or per token):
  prompts   uid int64: number of the row in the data stream, unique over epochs · record list[dict]: the data row ·
            prompt_ids int64/token · prompt_text list[str]
  samples   all of the above repeated n times, and group int64: index of the prompt in the batch · sample int64:
            0..n-1 inside the group · response_ids int64/token (end token included when it was sampled) ·
            logprobs float32/token: of the policy that sampled, at the sampling temperature · text list[str]: decoded
            without special tokens · truncated bool: max_new was reached without an end token · version int64: the
            oldest that made a token of it, from which its age is counted · versions list[tuple[Segment, ...]]: how
            many tokens each version made, in the order of the tokens · after a multi-turn stage also mask int64/token:
            0 = a token of the environment, turns int64 · where samples carry over also step int64: the step whose
            random numbers the sample draws
            Where ranks share a group (`Batch.share`), group counts over the whole step.
  selected  samples with score float: what they were selected by. `group` is numbered anew · round int64, after a refill
            only: which taking of prompts the row is from, see stages/selection.py

A column beside rows is a float array (one number per row) or a `Packed` of float32 (one per response token). NaN in it
means "not applicable": the row enters no mean and no loss. Stages that compute numbers with a model or take them from
a function refuse a NaN that is a fault, so no other NaN can arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Packed:
    """Ragged rows in one tensor. `values` [total tokens], `offsets` int64 [rows + 1], offsets[0] = 0."""

    values: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[float] | torch.Tensor], dtype: torch.dtype) -> Packed:
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        lengths = torch.tensor([0, *(len(t) for t in tensors)], dtype=torch.int64)
        values = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
        return cls(values, torch.cumsum(lengths, 0))

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [rows]"""
        return self.offsets[1:] - self.offsets[:-1]

    def row(self, index: int) -> torch.Tensor:
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def select(self, indices: Sequence[int] | np.ndarray) -> Packed:
        """The given rows, in the given order."""
        return Packed.from_rows([self.row(int(i)) for i in indices], self.values.dtype)

    @classmethod
    def concat(cls, parts: Sequence[Packed]) -> Packed:
        """The rows of all parts, in order; at least one part."""
        lengths = torch.cat([torch.zeros(1, dtype=torch.int64), *(part.lengths for part in parts)])
        return cls(torch.cat([part.values for part in parts]), torch.cumsum(lengths, 0))

    def row_ids(self) -> torch.Tensor:
        """int64 [total]: the row each value belongs to."""
        return torch.repeat_interleave(torch.arange(self.rows), self.lengths)


Column = Packed | np.ndarray | list[Any]


@dataclass(frozen=True)
class Share:
    """Which samples of a step's `prompts` are those of `rank`, one of `ranks`, where prompts do not divide over ranks.

    Every rank has an equal part of the samples in the order of the prompts, so that a group may lie on several.
    """

    prompts: int
    rank: int
    ranks: int

    @property
    def touched(self) -> range:
        """Numbers of the prompts that the rank has samples of."""
        return range(self.rank * self.prompts // self.ranks, -(-(self.rank + 1) * self.prompts // self.ranks))

    @property
    def begun(self) -> range:
        """Numbers of the prompts whose first sample is the rank's: every prompt is begun on exactly one rank."""
        return range(-(-self.rank * self.prompts // self.ranks), -(-(self.rank + 1) * self.prompts // self.ranks))

    def samples(self, n: int) -> range:
        """Numbers in the whole step of the rank's samples, `n` per prompt."""
        total = self.prompts * n
        return range(self.rank * total // self.ranks, (self.rank + 1) * total // self.ranks)


@dataclass
class Batch:
    """Rows with named columns; see the module's text for the names.

    `share` None: every group is whole. Otherwise other ranks may have samples of the same groups.
    """

    rows: int
    columns: dict[str, Column] = field(default_factory=dict)
    share: Share | None = None

    def packed(self, name: str) -> Packed:
        column = self.columns[name]
        assert isinstance(column, Packed), f"{name} is not a per-token column"
        return column

    def array(self, name: str) -> np.ndarray:
        column = self.columns[name]
        assert isinstance(column, np.ndarray), f"{name} is not a per-row array"
        return column

    def items(self, name: str) -> list[Any]:
        column = self.columns[name]
        assert isinstance(column, list), f"{name} is not a list column"
        return column

    def with_columns(self, **columns: Column) -> Batch:
        return Batch(self.rows, {**self.columns, **columns}, self.share)

    def select(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """The given rows of every column, in the given order."""
        chosen = [int(i) for i in indices]
        columns: dict[str, Column] = {}
        for name, column in self.columns.items():
            if isinstance(column, Packed):
                columns[name] = column.select(chosen)
            elif isinstance(column, np.ndarray):
                columns[name] = column[chosen]
            else:
                columns[name] = [column[i] for i in chosen]
        return Batch(len(chosen), columns, self.share)

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """All rows of batches with the same columns, in order; at least one batch."""
        columns: dict[str, Column] = {}
        for name in batches[0].columns:
            parts = [batch.columns[name] for batch in batches]
            first = parts[0]
            if isinstance(first, Packed):
                columns[name] = Packed.concat([part for part in parts if isinstance(part, Packed)])
            elif isinstance(first, np.ndarray):
                columns[name] = np.concatenate([np.asarray(part) for part in parts])
            else:
                columns[name] = [item for batch in batches for item in batch.items(name)]
        return cls(sum(batch.rows for batch in batches), columns)
