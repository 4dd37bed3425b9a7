"""A weight laid out as the matrix unit of an NPU reads it: FRACTAL_NZ, blocks of 16 x 16, instead of row by row.

The values are the same, and so is what every operator says of shape and dtype. What is not: a plain copy into such a
weight, or a copy of its storage, is read as other numbers. It is for weights that nothing writes or moves any more.

torch_npu: `npu_format_cast`. Unless the option `allow_internal_format` is on, which is off by default, it warns and
casts nothing; it is switched on for the cast alone.
"""

from __future__ import annotations

from typing import Final

import torch

from rlflow.backends.ray_runtime.kernels.kernel import Checker, Kernel, shape

FRACTAL_NZ: Final = 29
"""CANN's number of the format."""
BLOCK: Final = 16
"""Elements of 16 bits to a side of a block."""
DTYPES: Final = (torch.float16, torch.bfloat16)


def reference(weight: torch.Tensor) -> torch.Tensor:
    """weight [rows, columns] or [experts, rows, columns]; returns the same tensor: elsewhere there is one format."""
    return weight


def npu(weight: torch.Tensor) -> torch.Tensor:
    """As `reference`, in new memory."""
    import torch_npu

    before = torch_npu._C._npu_getOption(_OPTION)
    torch.npu.config.allow_internal_format = True
    try:
        cast: torch.Tensor = torch_npu.npu_format_cast(weight.contiguous(), FRACTAL_NZ)
    finally:
        torch.npu.config.allow_internal_format = before == b"enable"
    return cast


_OPTION: Final = "ALLOW_INTERNAL_FORMAT"


def fits(weight: torch.Tensor) -> bool:
    """Whether a weight's sizes fill whole blocks."""
    return weight.dim() in (2, 3) and not any(size % BLOCK for size in weight.shape[-2:])


def check(checker: Checker, weight: torch.Tensor) -> None:
    """A matrix or one per expert, 16 bits, whole blocks, and not trained."""
    checker.floating("weight", weight, *DTYPES)
    checker.dims("weight", weight, 2, 3)
    checker.that(
        not weight.requires_grad,
        "weight is trained, and an update would write rows into blocks",
        "detach what is frozen",
    )
    for name, size in zip(("rows", "columns"), weight.shape[-2:], strict=True):
        nearest = max(BLOCK, round(size / BLOCK) * BLOCK)
        checker.limit(
            size > 0 and size % BLOCK == 0,
            f"weight {shape(weight)} has {size} {name}, not a multiple of {BLOCK}; the nearest is {nearest}",
        )


format_cast = Kernel("format_cast", reference=reference, npu=npu, check=check)
