"""Root-mean-square norm over the last axis (Zhang & Sennrich 2019): x / sqrt(mean(x^2) + epsilon) * gamma.

torch_npu: `npu_rms_norm`. Its gamma has x's dtype, or is fp32 beside a narrower x.
"""

from __future__ import annotations

import torch

from rlflow.backends.ray_runtime.kernels.kernel import Checker, Kernel, dtype, shape, wide


def reference(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    """x [..., size], gamma [size]; returns x's shape and dtype. Computed in fp32 at least."""
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon)
    return (gamma * y.to(x.dtype)).to(x.dtype)


def npu(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    """As `reference`."""
    import torch_npu

    y: torch.Tensor = torch_npu.npu_rms_norm(x, gamma, epsilon)[0]
    return y


def check(checker: Checker, x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> None:
    """Both norms have this rule."""
    checker.floating("x", x)
    checker.dims("gamma", gamma, 1)
    checker.that(1 < x.dim() <= 8, f"x {shape(x)} has {x.dim()} dimensions, not 2 to 8")
    checker.that(
        gamma.shape[0] == x.shape[-1], f"gamma has {gamma.shape[0]} elements, and the last axis of x {x.shape[-1]}"
    )
    checker.that(
        gamma.dtype in (x.dtype, torch.float32),
        f"gamma is {dtype(gamma)} beside x of {dtype(x)}: not the same, nor fp32",
    )
    checker.that(epsilon > 0, f"epsilon is {epsilon:g}, not positive")


rms_norm = Kernel("rms_norm", reference=reference, npu=npu, check=check)
