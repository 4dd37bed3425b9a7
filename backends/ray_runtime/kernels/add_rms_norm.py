"""The residual's addition and the norm after it in one read of memory: y = rms_norm(x1 + x2).

torch_npu: `npu_add_rms_norm`, which has no derivative: with gradients, add and call `rms_norm`.
"""

from __future__ import annotations

import torch

from rlflow.backends.ray_runtime.kernels.kernel import Checker, Kernel, shape
from rlflow.backends.ray_runtime.kernels.rms_norm import check as check_rms_norm
from rlflow.backends.ray_runtime.kernels.rms_norm import reference as rms_norm_reference


def reference(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """x1, x2 [..., size], gamma [size]; returns (the norm, the sum), both like x1."""
    total = x1 + x2
    return rms_norm_reference(total, gamma, epsilon), total


def npu(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference`."""
    import torch_npu

    y, _, total = torch_npu.npu_add_rms_norm(x1, x2, gamma, epsilon)
    return y, total


def check(checker: Checker, x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> None:
    """One shape and dtype, no gradient on an NPU."""
    checker.that(x1.shape == x2.shape, f"x1 {shape(x1)} and x2 {shape(x2)} differ")
    checker.same_dtype(x1=x1, x2=x2)
    check_rms_norm(checker, x1, gamma, epsilon)
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in (x1, x2, gamma))
    checker.limit(not wants, "a gradient is wanted, and the operator has no derivative", "add, then call rms_norm")
    checker.limit(gamma.dtype == x1.dtype, "gamma has another type than x")


add_rms_norm = Kernel("add_rms_norm", reference=reference, npu=npu, check=check)
