"""What CUDA devices and NPUs share: torch.npu has torch.cuda's functions under the same names."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from rlflow.backends.ray_runtime.devices.device import Device, Event, Memory


class Accelerator(Device):
    """A device with streams and memory of its own."""

    @staticmethod
    @abstractmethod
    def api() -> Any:
        """The module `torch.cuda`, or one with its functions."""

    @classmethod
    def count(cls) -> int:
        api = cls.api()
        return int(api.device_count()) if api is not None and api.is_available() else 0

    def activate(self) -> None:
        self.api().set_device(self.index)

    def name(self) -> str:
        return str(self.api().get_device_name(self.index))

    def synchronize(self) -> None:
        self.api().synchronize(self.index)

    @contextlib.contextmanager
    def stream(self) -> Iterator[Any]:
        api = self.api()
        side = api.Stream(device=self.torch_device)
        side.wait_stream(api.current_stream(self.index))
        with api.stream(side):
            yield side

    def hold(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.api().current_stream(self.index))

    def event(self) -> Event:
        mark = self.api().Event()
        mark.record(self.api().current_stream(self.index))
        return Event(mark)

    def memory(self) -> Memory:
        api = self.api()
        free, total = api.mem_get_info(self.index)
        return Memory(
            allocated=api.memory_allocated(self.index),
            peak=api.max_memory_allocated(self.index),
            reserved=api.memory_reserved(self.index),
            free=free,
            total=total,
        )

    def reset_peak(self) -> None:
        self.api().reset_peak_memory_stats(self.index)

    def release_cache(self) -> None:
        self.api().empty_cache()

    def pinned(self, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)
