"""Packed rows: values of all rows one after another, and the rows' lengths.

A mask says which tokens the policy chose: 1 = counted, 0 = a token that something else wrote (a tool's answer, an
observation) or that must not be learned from. A missing mask counts every token.
"""

from __future__ import annotations

import torch


def check_rows(lengths: torch.Tensor, *columns: torch.Tensor | None) -> None:
    """ValueError unless every given column has one entry per token of the rows."""
    tokens = int(lengths.sum())
    for column in columns:
        if column is not None and column.shape != (tokens,):
            raise ValueError(f"rows have {tokens} tokens, a column has shape {tuple(column.shape)}")


def row_ids(lengths: torch.Tensor) -> torch.Tensor:
    """int64 [tokens]: the row each token belongs to; `lengths` int64 [rows]."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def positions(lengths: torch.Tensor) -> torch.Tensor:
    """int64 [tokens]: the number of each token inside its row, from 0."""
    starts = torch.cumsum(lengths, 0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) - starts[row_ids(lengths)]


def padded(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[rows, longest row], zeros behind each row's end. The gradient flows through."""
    width = int(lengths.max()) if len(lengths) else 0
    return values.new_zeros((len(lengths), width)).index_put((row_ids(lengths), positions(lengths)), values)


def repacked(matrix: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[tokens]: the inverse of `padded`."""
    return matrix[row_ids(lengths), positions(lengths)]


def blank(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Tokens that are not counted become 0 and carry no gradient.

    A weight of 0 is not enough where such a value is not finite: the loss would be 0, its gradient 0 x inf.
    """
    return values if mask is None else torch.where(mask > 0, values, torch.zeros_like(values))


def row_counts(lengths: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [rows]: counted tokens of each row."""
    if mask is None:
        return lengths.to(torch.float32)
    return padded((mask > 0).to(torch.float32), lengths).sum(1)


def row_sums(values: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """[rows]: sum over each row's counted tokens. No atomic additions: the result is the same on every call."""
    check_rows(lengths, values, mask)
    return padded(blank(values, mask), lengths).sum(1)


def row_means(values: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """[rows]: mean over each row's counted tokens; 0 for a row that has none."""
    return row_sums(values, lengths, mask) / row_counts(lengths, mask).clamp(min=1.0).to(values.dtype)
