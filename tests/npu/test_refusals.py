"""Why the kernels have rules of their own: what torch_npu's shape functions take without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlflow.backends.ray_runtime.kernels.table import attention, grouped_matmul, rms_norm, swiglu
from rlflow.diagnostics.diagnostic import RunFailure


def t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="npu")


BAD = {
    "gamma of another length": lambda n: (lambda: n.npu_rms_norm(t(2, 16), t(8)), lambda: rms_norm(t(2, 16), t(8))),
    "odd swiglu": lambda n: (lambda: n.npu_swiglu(t(3, 9)), lambda: swiglu(t(3, 9))),
    "inner sizes that clash": lambda n: (
        lambda: n.npu_grouped_matmul([t(6, 4)], [t(2, 5, 3)], group_list=t(2, dtype=torch.int64), split_item=2, group_type=0, group_list_type=1),
        lambda: grouped_matmul(t(6, 4), t(2, 5, 3), t(2, dtype=torch.int64)),
    ),
    "heads that do not divide": lambda n: (
        lambda: n.npu_fusion_attention(t(2, 12, 8, 64), t(2, 8, 8, 64), t(2, 8, 8, 64), 12, "BNSD"),
        lambda: attention(t(2, 12, 8, 64), t(2, 8, 8, 64), t(2, 8, 8, 64), scale=1.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_torch_npu_takes_it_and_the_kernel_does_not(case: str, calls: Any, real_torch_npu: Any) -> None:
    operator, kernel = BAD[case](real_torch_npu)
    with calls() as seen:
        operator()
        assert len(seen) == 1
        with pytest.raises(RunFailure, match="kernel `"):
            kernel()
        assert len(seen) == 1
