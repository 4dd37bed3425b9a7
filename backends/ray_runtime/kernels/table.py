"""Every kernel, in one place. Importing this module makes them known by name."""

from __future__ import annotations

from rlflow.backends.ray_runtime.kernels.adamw import adamw
from rlflow.backends.ray_runtime.kernels.add_rms_norm import add_rms_norm
from rlflow.backends.ray_runtime.kernels.attention import attention
from rlflow.backends.ray_runtime.kernels.format_cast import format_cast
from rlflow.backends.ray_runtime.kernels.gating import gating
from rlflow.backends.ray_runtime.kernels.grouped_matmul import grouped_matmul
from rlflow.backends.ray_runtime.kernels.infer_attention import infer_attention, write_cache
from rlflow.backends.ray_runtime.kernels.rms_norm import rms_norm
from rlflow.backends.ray_runtime.kernels.rotary import rotary
from rlflow.backends.ray_runtime.kernels.routing import route, unpermute
from rlflow.backends.ray_runtime.kernels.swiglu import swiglu

__all__ = [
    "adamw",
    "add_rms_norm",
    "attention",
    "format_cast",
    "gating",
    "grouped_matmul",
    "infer_attention",
    "rms_norm",
    "rotary",
    "route",
    "swiglu",
    "unpermute",
    "write_cache",
]
