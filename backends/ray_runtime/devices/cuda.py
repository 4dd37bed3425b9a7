"""NVIDIA devices through torch.cuda."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from rlflow.backends.ray_runtime.devices.accelerator import Accelerator


class Cuda(Accelerator):
    kind: ClassVar[str] = "cuda"
    collective_backend: ClassVar[str] = "nccl"
    ray_resource: ClassVar[str] = "GPU"
    visible_variable: ClassVar[str] = "CUDA_VISIBLE_DEVICES"

    @staticmethod
    def api() -> Any:
        return torch.cuda
