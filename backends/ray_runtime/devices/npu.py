"""Ascend NPUs through torch_npu: one device is one die."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from rlflow.backends.ray_runtime.devices.accelerator import Accelerator


class Npu(Accelerator):
    kind: ClassVar[str] = "npu"
    collective_backend: ClassVar[str] = "hccl"
    ray_resource: ClassVar[str] = "NPU"
    visible_variable: ClassVar[str] = "ASCEND_RT_VISIBLE_DEVICES"

    @staticmethod
    def api() -> Any:
        """`torch.npu`, which importing torch_npu puts there; None without the package. A package that is there and
        fails to load (CANN missing, another torch) raises: it must not look like a host without NPUs."""
        try:
            import torch_npu  # noqa: F401
        except ModuleNotFoundError as error:
            if error.name == "torch_npu":
                return None
            raise
        return torch.npu

    def group_options(self, buffer_bytes: int | None = None) -> Any:
        if buffer_bytes is None:
            return None
        import torch_npu

        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = {"hccl_buffer_size": buffer_bytes >> 20}  # HCCL counts MiB
        return options
