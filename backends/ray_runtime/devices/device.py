"""What the runtime needs of a device, whatever its kind."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from rlflow.diagnostics.diagnostic import RunFailure, one_of


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, as its allocator and its driver see them."""

    allocated: int
    """In tensors now."""
    peak: int
    """The most that was in tensors since `reset_peak`."""
    reserved: int
    """Taken from the driver: `allocated` and what the allocator keeps for later."""
    free: int
    """What the driver has left."""
    total: int


class Device(ABC):
    """One device of this process. Indices are logical: those that the visible-devices variable leaves."""

    kind: ClassVar[str]
    """torch's device type: `npu`, `cuda` or `cpu`."""
    collective_backend: ClassVar[str]
    """torch.distributed's: `hccl`, `nccl` or `gloo`."""
    ray_resource: ClassVar[str]
    """What a rank asks Ray for: `NPU`, `GPU` or `CPU`."""
    visible_variable: ClassVar[str]
    """Environment variable that says which devices a process sees; empty where there is none."""

    def __init__(self, index: int = 0) -> None:
        self.index = index

    @property
    def torch_device(self) -> torch.device:
        """Where this device's tensors lie."""
        return torch.device(self.kind, self.index)

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """Devices that this process sees; 0 without the package or driver."""

    @abstractmethod
    def activate(self) -> None:
        """Make it the current device of this process: once, before anything else."""

    @abstractmethod
    def name(self) -> str:
        """The product, as its driver calls it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was started on the device has ended."""

    @abstractmethod
    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """A queue of work beside the current one, current inside the block. It starts after what was started before
        the block; leaving the block does not wait for it: record an event inside."""

    @abstractmethod
    def hold(self, tensor: torch.Tensor) -> None:
        """The current stream uses this memory too: once freed, it is not given to other work before that has ended."""

    @abstractmethod
    def event(self) -> Event:
        """A mark in the current stream, made now."""

    @abstractmethod
    def memory(self) -> Memory:
        """As of now. On a CPU `allocated` is the process, and there is no `peak` but the process's own."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Count `Memory.peak` from now on. Nothing on a CPU."""

    @abstractmethod
    def release_cache(self) -> None:
        """Give what the allocator keeps for later back to the driver. Slow (seconds): only where another process needs
        the memory."""

    def group_options(self, buffer_bytes: int | None = None) -> Any:
        """`pg_options` of a process group on this device whose communicator takes `buffer_bytes` per direction, a
        multiple of 1 MiB; None = the library's default, and all that there is for other kinds than NPUs."""
        return None

    @abstractmethod
    def pinned(self, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device copies from and to without a detour. Ordinary memory on a CPU."""


class Event:
    """A mark in a stream: others wait for it, or the host does."""

    def __init__(self, mark: Any = None) -> None:
        self._mark = mark

    def wait(self) -> None:
        """Everything started on the current stream from now on comes after the mark. Does not hold the host up."""
        if self._mark is not None:
            self._mark.wait()

    def synchronize(self) -> None:
        """Hold the host up until the mark is reached."""
        if self._mark is not None:
            self._mark.synchronize()

    def reached(self) -> bool:
        """Whether it is reached already."""
        return self._mark is None or bool(self._mark.query())


def _cpu() -> type[Device]:
    from rlflow.backends.ray_runtime.devices.cpu import Cpu

    return Cpu


def _cuda() -> type[Device]:
    from rlflow.backends.ray_runtime.devices.cuda import Cuda

    return Cuda


def _npu() -> type[Device]:
    from rlflow.backends.ray_runtime.devices.npu import Npu

    return Npu


DEVICES: Final[dict[str, Callable[[], type[Device]]]] = {"cpu": _cpu, "cuda": _cuda, "npu": _npu}
"""By the kind that a pool names. A kind is imported when it is asked for."""


def device_class(kind: str) -> type[Device]:
    """The class of a kind. RLF5032 for a kind that there is not."""
    if kind not in DEVICES:
        raise RunFailure("RLF5032", f"`{kind}` is no kind of device", help=(f"use {one_of(DEVICES)}",))
    return DEVICES[kind]()


def open_device(kind: str, index: int = 0) -> Device:
    """A device of this process, made current. RLF5032 where it is not there: another kind is never taken instead."""
    found = device_class(kind)
    there = found.count()
    if not 0 <= index < there:
        variable = found.visible_variable
        raise RunFailure(
            "RLF5032",
            f"{kind} device {index} is not there: this process sees {there}",
            notes=_why(kind, variable),
            help=(
                f"look at {variable} and at the driver" if variable else "use index 0",
                "or compile the plan for the devices that are there",
            ),
        )
    device = found(index)
    device.activate()
    return device


def _why(kind: str, variable: str) -> Iterator[str]:
    import importlib.util
    import os

    if kind == "npu" and importlib.util.find_spec("torch_npu") is None:
        yield "the package torch_npu is not installed"
    if variable and variable in os.environ:
        yield f"{variable} is `{os.environ[variable]}`"
