"""The gated unit of Llama-like MLPs (Shazeer 2020): silu(gate) * up, of one tensor that holds gate, then up.

torch_npu: `npu_swiglu`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rlflow.backends.ray_runtime.kernels.kernel import Checker, Kernel


def reference(x: torch.Tensor) -> torch.Tensor:
    """x [..., 2 size], gate first; returns [..., size]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def npu(x: torch.Tensor) -> torch.Tensor:
    """As `reference`. The operator reads contiguous memory."""
    import torch_npu

    y: torch.Tensor = torch_npu.npu_swiglu(x.contiguous(), dim=-1)
    return y


def check(checker: Checker, x: torch.Tensor) -> None:
    """An even last axis."""
    checker.floating("x", x)
    checker.that(1 <= x.dim() <= 8, f"x has {x.dim()} dimensions, not 1 to 8")
    checker.that(x.shape[-1] % 2 == 0, f"the last axis of x has {x.shape[-1]} elements, an odd number")


swiglu = Kernel("swiglu", reference=reference, npu=npu, check=check)
