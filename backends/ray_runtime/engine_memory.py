"""The device memory of an engine's weights: given up and taken back under the very same tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


class WeightMemory:
    """`tensors` by name keep their identity, shape and type; without memory they must not be read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
        self._storages = [(storage, storage.nbytes()) for storage in found.values()]
        self._host: torch.Tensor | None = None
        self.held = True

    @property
    def whole(self) -> int:
        """Bytes when awake."""
        return sum(size for _, size in self._storages)

    @property
    def device_bytes(self) -> int:
        return sum(storage.nbytes() for storage, _ in self._storages)

    @property
    def host_bytes(self) -> int:
        return 0 if self._host is None else self._host.untyped_storage().nbytes()

    def give_up(self, keep: bool) -> None:
        """Free the device's memory; `keep`: after a copy to host memory, which is pinned beside an accelerator."""
        if keep:
            pinned = any(storage.device.type != "cpu" for storage, _ in self._storages)
            self._host = torch.empty(self.whole, dtype=torch.uint8, pin_memory=pinned)
            for (storage, _), part in zip(self._storages, self._parts(), strict=True):
                part.copy_(_bytes(storage))
        for storage, _ in self._storages:
            storage.resize_(0)
        self.held = False

    def take_back(self) -> bool:
        """Memory for all tensors, and their values from host memory, or zeros. Whether they have their values."""
        for storage, size in self._storages:
            storage.resize_(size)
        kept = self._host is not None
        if kept:
            for (storage, _), part in zip(self._storages, self._parts(), strict=True):
                _bytes(storage).copy_(part)
            self._host = None
        else:
            for storage, _ in self._storages:
                _bytes(storage).zero_()  # padding is never sent
        self.held = True
        return kept

    def _parts(self) -> Iterable[torch.Tensor]:
        assert self._host is not None
        yield from self._host.split([size for _, size in self._storages])


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
