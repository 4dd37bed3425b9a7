"""The host itself as a device: no streams, no pinned memory, everything has ended when its call returns."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import ClassVar

import torch

from rlflow.backends.ray_runtime.devices.device import Device, Event, Memory

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Cpu(Device):
    """All cores together are device 0."""

    kind: ClassVar[str] = "cpu"
    collective_backend: ClassVar[str] = "gloo"
    ray_resource: ClassVar[str] = "CPU"
    visible_variable: ClassVar[str] = ""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def count(cls) -> int:
        return 1

    def activate(self) -> None:
        pass

    def name(self) -> str:
        return f"CPU with {os.cpu_count()} cores"

    def synchronize(self) -> None:
        pass

    def stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def hold(self, tensor: torch.Tensor) -> None:
        pass

    def event(self) -> Event:
        return Event()

    def memory(self) -> Memory:
        """The process's resident memory, and the host's free and total memory."""
        resident = _resident()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        free = os.sysconf("SC_AVPHYS_PAGES") * _PAGE
        return Memory(resident, max(peak, resident), resident, free, os.sysconf("SC_PHYS_PAGES") * _PAGE)

    def reset_peak(self) -> None:
        pass

    def release_cache(self) -> None:
        pass

    def pinned(self, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE
