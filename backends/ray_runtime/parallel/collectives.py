"""Differentiable collectives on plain tensors, in pairs that are each other's gradients.

A value is called replicated when all ranks of a group hold the same one and compute the same loss from it; its gradient
is then the same on all of them too. `group` None is a group of one rank: nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""`gather_into(whole, part, group=...)`. Newer versions of torch warn about the old name."""
scatter_sum: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""`scatter_sum(part, whole, group=...)`"""


def enter(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """A replicated value, from here on used differently on every rank: the gradients are summed."""
    return values if group is None else _Enter.apply(values, group)


def leave(parts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The replicated sum of every rank's part: each part gets the sum's gradient."""
    return parts if group is None else _Leave.apply(parts, group)


def split_rows(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's part of the rows of a replicated value, as torch.chunk cuts: the gradient is put together again."""
    return values if group is None else _SplitRows.apply(values, group)


def join_rows(part: torch.Tensor, rows: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The replicated value of `rows` rows that `split_rows` took apart: every rank gets its part of the gradient."""
    return part if group is None else _JoinRows.apply(part, rows, group)


def exchange_rows(
    values: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """All-to-all of rows: `sent[i]` rows go to rank i, in order, `received[i]` come from it.

    Returns [sum(received), ...]. The gradient goes the other way.
    """
    if group is None:
        return values
    return _ExchangeRows.apply(values, sent, received, group)


class _Enter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(grad, ctx.group), None


class _Leave(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _summed(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _SplitRows(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.rows = group, len(values)
        low, high = part_of(len(values), group)
        return values[low:high].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _joined(grad, ctx.rows, ctx.group), None


class _JoinRows(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.bounds = part_of(rows, group)
        return _joined(part, rows, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        low, high = ctx.bounds
        return grad[low:high].clone(), None, None


class _ExchangeRows(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(values, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def part_of(rows: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """[low, high) of this rank's rows, as torch.chunk cuts."""
    step = -(-rows // group.size())
    low = min(group.rank() * step, rows)
    return low, min(low + step, rows)


def _summed(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = values.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _joined(part: torch.Tensor, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    step = -(-rows // group.size())
    padded = part.new_zeros((step, *part.shape[1:]))
    padded[: len(part)] = part
    whole = part.new_empty((step * group.size(), *part.shape[1:]))
    gather_into(whole, padded, group=group)
    return whole[:rows]


def _exchanged(values: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    found = values.new_empty((sum(received), *values.shape[1:]))
    dist.all_to_all_single(found, values.contiguous(), received, sent, group=group)
    return found
