"""The device memory of an engine's weights: given up and taken back under the very same tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in one of the storages."""

    tensor: torch.Tensor
    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class WeightMemory:
    """All tensors that look at the weights, views of one storage among them. They keep identity, shape and type.

    While the memory is given up they read as NaN, and writing to them is an error of torch.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages: list[torch.UntypedStorage] = []
        self._places: list[_Place] = []
        known: dict[int, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            number = known.setdefault(storage.data_ptr(), len(self._storages))
            if number == len(self._storages):
                self._storages.append(storage)
            self._places.append(
                _Place(tensor, number, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
            )
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._host: torch.Tensor | None = None
        self.held = True

    @property
    def whole(self) -> int:
        """Bytes when awake."""
        return sum(self._sizes)

    @property
    def device_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    @property
    def host_bytes(self) -> int:
        return 0 if self._host is None else self._host.untyped_storage().nbytes()

    def give_up(self, keep: bool) -> None:
        """Free the device's memory; `keep`: after a copy to host memory, which is pinned beside an accelerator."""
        if keep:
            pinned = any(storage.device.type != "cpu" for storage in self._storages)
            self._host = torch.empty(self.whole, dtype=torch.uint8, pin_memory=pinned)
            for storage, part in zip(self._storages, self._host.split(self._sizes), strict=True):
                part.copy_(_bytes(storage))
        for place in self._places:
            # set_ and not a resize of the storage: torch refuses that once a numpy array has looked at the memory.
            nothing = place.tensor.new_full((), float("nan")).untyped_storage()
            _point(place, nothing, 0, (0,) * len(place.size))
        self._storages = []
        self.held = False

    def take_back(self) -> bool:
        """Memory for all tensors, and their values from host memory, or zeros. Whether they have their values."""
        device = self._places[0].tensor.device
        flats = [torch.zeros(size, dtype=torch.uint8, device=device) for size in self._sizes]  # padding is never sent
        self._storages = [flat.untyped_storage() for flat in flats]
        for place in self._places:
            _point(place, self._storages[place.storage], place.offset, place.stride)
        kept = self._host is not None
        if self._host is not None:
            for flat, part in zip(flats, self._host.split(self._sizes), strict=True):
                flat.copy_(part)
            self._host = None
        self.held = True
        return kept


@torch.no_grad()  # type: ignore[untyped-decorator]
def _point(place: _Place, storage: torch.UntypedStorage, offset: int, stride: tuple[int, ...]) -> None:
    place.tensor.set_(storage, offset, place.size, stride)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
