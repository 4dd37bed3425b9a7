"""Rotary positions (Su et al. 2021), halves convention: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), where x1 and x2
are the first and the second half of the last axis.

Pairs that lie side by side (DeepSeek) are brought into halves first; `halves` does that, and the result stays in
halves, as in transformers. torch_npu: `npu_rotary_mul` in its mode `half`.
"""

from __future__ import annotations

import torch

from rlflow.backends.ray_runtime.kernels.kernel import Checker, Kernel, shape

_MOST_SIZE = 896
_MOST_ROWS = 1000
_MOST_ROWS_WITH_GRADIENT = 1024


def halves(x: torch.Tensor) -> torch.Tensor:
    """(x0, x1, x2, x3, ...) -> (x0, x2, ..., x1, x3, ...) along the last axis."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [batch, heads, length, size] or with heads and length exchanged; cos and sin broadcast to it, size `size`."""
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat((-x2, x1), -1) * sin


def npu(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As `reference`."""
    import torch_npu

    y: torch.Tensor = torch_npu.npu_rotary_mul(x, cos, sin, "half")
    return y


def check(checker: Checker, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Limits of `npu_rotary_mul` in its mode `half`."""
    checker.floating("x", x)
    checker.dims("x", x, 4)
    checker.dims("cos", cos, 4)
    checker.same_dtype(x=x, cos=cos, sin=sin)
    checker.that(cos.shape == sin.shape, f"cos {shape(cos)} and sin {shape(sin)} differ")
    size = x.shape[-1]
    checker.that(size % 2 == 0, f"the last axis of x has {size} elements, an odd number")
    checker.that(
        all(c in (1, n) for c, n in zip(cos.shape[:3], x.shape[:3], strict=True)) and cos.shape[3] == size,
        f"cos {shape(cos)} does not broadcast to x {shape(x)}",
    )
    checker.limit(size < _MOST_SIZE, f"the last axis has {size} elements, and {_MOST_SIZE - 2} are the most")
    batch, heads = x.shape[0], min(x.shape[1], x.shape[2])
    checker.limit(batch < _MOST_ROWS, f"{batch} rows, and {_MOST_ROWS - 1} are the most", "use smaller micro-batches")
    wants = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    checker.limit(
        not wants or batch * heads <= _MOST_ROWS_WITH_GRADIENT,
        f"{batch} rows x {heads} heads with a gradient of cos, and {_MOST_ROWS_WITH_GRADIENT} are the most",
    )


rotary = Kernel("rotary", reference=reference, npu=npu, check=check)
