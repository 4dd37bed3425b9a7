"""Tensors that leave a device for host memory and come back to where every reference to them looks.

The tensor object stays; its storage on the device is emptied and filled again (MindSpeed-RL's resharding does the
same), so that modules, optimizers and views of the whole tensor need not be told. Between `offload` and `onload` the
values must not be touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from rlflow.backends.ray_runtime.devices.device import Device, Event


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the host. numpy may look at it; memory that numpy has looked at cannot be given back."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def own_memory(tensors: Iterable[torch.Tensor]) -> None:
    """Give tensors memory that can be given back: that of a file, or what numpy has looked at, cannot be. `tensors` are
    all that look at it; they keep what they share among each other."""
    moved: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.resizable():
            continue
        if storage._cdata not in moved:
            moved[storage._cdata] = torch.empty(0, dtype=torch.uint8).set_(storage).clone()
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy.set_(moved[storage._cdata].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = copy


class Swap:
    """Some tensors of one device as one thing that is on the device, on the host, or nowhere.

    States: on the device -> `offload` -> on the host -> `onload` -> on the device; or `drop` -> nowhere -> `onload`
    gives memory with undefined values, to be written anew. Several tensors on one storage are moved once.
    """

    def __init__(self, device: Device, tensors: Iterable[torch.Tensor]) -> None:
        self._device = device
        self._storages: list[torch.UntypedStorage] = []
        seen = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self._storages.append(storage)
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._host: list[torch.Tensor] = []
        self._kept = True
        self.on_device = True

    @property
    def num_bytes(self) -> int:
        """What they take on the device."""
        return sum(self._sizes)

    @property
    def host_bytes(self) -> int:
        """What the host keeps for them: also while they are on the device."""
        return sum(host.nbytes for host in self._host)

    def offload(self, aside: bool = False) -> Event:
        """Copy to the host and free the device's memory, in the current stream or `aside`, in one beside it.

        The event marks the end of the copy; before it the host's copy is not whole, and memory that is freed is not
        used again. The host memory is kept for the next time: pinning is slow.
        """
        self._expect(True, "offloaded")
        if not self._host:
            self._host = [self._device.pinned(torch.Size([size]), torch.uint8) for size in self._sizes]
        with self._device.stream() if aside else contextlib.nullcontext():
            for storage, host in zip(self._storages, self._host, strict=True):
                view = self._bytes(storage)
                host.copy_(view, non_blocking=True)
                self._device.hold(view)
            done = self._device.event()
        self._empty()
        self._kept = True
        return done

    def drop(self, keep: bool = False) -> None:
        """Free the device's memory and forget the values. `keep`: the host's copy of the last `offload` holds them
        still, since nothing has written them. ValueError where there is no such copy."""
        self._expect(True, "dropped")
        if keep and not self._host:
            raise ValueError("the host has no copy of these tensors")
        self._empty()
        self._kept = keep

    def onload(self, aside: bool = False) -> Event:
        """Take memory on the device again, and copy the values back where they were kept.

        With `aside` the copy runs beside the current stream, which must wait for the event before it reads. The memory
        itself is taken in the current stream in any case: there it is used and given back.
        """
        self._expect(False, "onloaded")
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        self.on_device = True
        with self._device.stream() if aside else contextlib.nullcontext():
            for storage, host in zip(self._storages, self._host if self._kept else (), strict=self._kept):
                view = self._bytes(storage)
                view.copy_(host, non_blocking=True)
                self._device.hold(view)
            return self._device.event()

    def release_host(self) -> None:
        """Free the host's memory. ValueError while it holds the only copy."""
        if not self.on_device and self._kept:
            raise ValueError("the host holds the only copy of these tensors")
        self._host = []

    def _empty(self) -> None:
        for storage in self._storages:
            storage.resize_(0)
        self.on_device = False

    def _expect(self, on_device: bool, verb: str) -> None:
        if self.on_device != on_device:
            raise ValueError(f"tensors that are {'not ' if on_device else ''}on the device cannot be {verb}")

    def _bytes(self, storage: torch.UntypedStorage) -> torch.Tensor:
        view = torch.empty(0, dtype=torch.uint8, device=storage.device)
        view.set_(storage, 0, (storage.nbytes(),))
        return view
