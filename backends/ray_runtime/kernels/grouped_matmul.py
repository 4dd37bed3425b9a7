"""Rows sorted by expert, each times its expert's matrix: y[rows of e] = x[rows of e] @ weight[e].

torch_npu: `npu_grouped_matmul` has no derivative, so the two of it are called here: dx as the same product with
transposed weights, dw with the rows as the grouped inner axis. Groups are given as counts: as cumulative sums the
operator would need one more operation per layer.
"""

from __future__ import annotations

from typing import Any

import torch

from rlflow.backends.ray_runtime.kernels.kernel import Checker, Kernel, dtype, shape

_MOST_GROUPS = 1024
_MOST_INNER = 65535
_ROWS_GROUPED = 0
_INNER_GROUPED = 2
_COUNTS = 1


def reference(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """x [rows, in], weight [experts, in, out], counts int64 [experts] with sum `rows`; returns [rows, out]."""
    parts = x.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


def npu(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """As `reference`. The operator refuses counts of length 1: one expert is a plain product."""
    if len(weight) == 1:
        return x @ weight[0]
    y: torch.Tensor = _GroupedMatmul.apply(x, weight, counts)
    return y


class _GroupedMatmul(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, counts)
        return _rows(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (dy,) = grads
        x, weight, counts = ctx.saved_tensors
        dx = _rows(dy, weight.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
        dw = _inner(x, dy, counts) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def _rows(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    import torch_npu

    y: torch.Tensor = torch_npu.npu_grouped_matmul(
        [x], [weight], group_list=counts, split_item=2, group_type=_ROWS_GROUPED, group_list_type=_COUNTS
    )[0]
    return y


def _inner(x: torch.Tensor, dy: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    import torch_npu

    y: torch.Tensor = torch_npu.npu_grouped_matmul(
        [x.t()], [dy], group_list=counts, split_item=3, group_type=_INNER_GROUPED, group_list_type=_COUNTS
    )[0]
    return y


def check(checker: Checker, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> None:
    """Matching inner sizes, one count per expert. The sum of the counts is not read: that would wait for the device."""
    checker.floating("x", x)
    checker.dims("x", x, 2)
    checker.dims("weight", weight, 3)
    checker.dims("counts", counts, 1)
    checker.same_dtype(x=x, weight=weight)
    checker.that(counts.dtype == torch.int64, f"counts is {dtype(counts)}, not int64")
    experts, inner, outer = weight.shape
    checker.that(
        x.shape[1] == inner, f"x {shape(x)} has rows of {x.shape[1]}, and weight {shape(weight)} takes {inner}"
    )
    checker.that(len(counts) == experts, f"{len(counts)} counts for {experts} experts")
    checker.limit(experts <= _MOST_GROUPS, f"{experts} experts on one device, and {_MOST_GROUPS} are the most")
    for name, number in (("in", inner), ("out", outer)):
        checker.limit(number <= _MOST_INNER, f"`{name}` of weight {shape(weight)} is {number}; most is {_MOST_INNER}")


grouped_matmul = Kernel("grouped_matmul", reference=reference, npu=npu, check=check)
