"""The objects of a plan's memory table as what a rank really holds: tensors that can leave the device and come back.

| object of the table | what it is here |
|---|---|
| `M weights` | the trainer's parameters, and those of an engine that reads them or has a copy in the same layout |
| `M rollout weights` | the copy of an engine whose weights come by a reshard |
| `M frozen weights` | of an engine whose adapters come by a reshard: the weights of layers without adapters |
| `M weights under adapters` | of such an engine: the frozen weights of the other layers |
| `M merged weights` | of such an engine: what it samples from, of the other layers |
| `M gradients` | the gradients, from backward to the end of the stage |
| `M optimizer` | AdamW's moments, the parts of weights that ZeRO keeps, and perhaps the master copy |
| `STAGE keys and values` | the most that the engine's cache had while it sampled |

With `compute = "bf16"` and an engine beside the trainer, `M weights` is the engine's copy in 16 bits, and the float32
weights are the optimizer's master copy, as the cost model counts them; where the plan has the optimizer away while a
stage reads them, they are counted with `M weights`, above what the plan has for it.

Activations, buckets and what is being computed come and go with their stage; no instruction moves them. AdamW's step
counters (4 bytes a tensor) stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch

from rlflow.backends.ray_runtime.devices.device import Device, Event
from rlflow.backends.ray_runtime.devices.swap import Swap
from rlflow.backends.ray_runtime.parallel.sharded import plain
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.backends.ray_runtime.trainer import Trainer

Tensors: TypeAlias = Callable[[], Iterable[torch.Tensor]]


class Held:
    """One object. `bytes`: what the plan says it takes when all of it is there; `fixed`: its values never change, so
    that a copy on the host stays valid.

    The plan moves bytes of its own estimate; here the same share moves, in whole tensors, so that no more stays than
    the plan says.
    """

    def __init__(
        self,
        name: str,
        planned: int,
        device: Device,
        tensors: Tensors,
        engine: RolloutEngine | None = None,
        fixed: bool = False,
    ) -> None:
        self.name, self.bytes, self.fixed = name, planned, fixed
        self.away_bytes = 0
        """Of the plan's bytes, those that are not on the device."""
        self._device = device
        self._tensors = tensors
        self._engine = engine
        self._asleep = False
        self._swaps: list[Swap] = []
        self._known: set[int] = set()
        self._coming: list[Event] = []

    @property
    def planned_bytes(self) -> int:
        """What the plan has of it on the device now."""
        return self.bytes - self.away_bytes

    def storages(self) -> list[torch.UntypedStorage]:
        """The device memory of its tensors, each once, without that of an engine."""
        found = {}
        for tensor in self._tensors():
            storage = plain(tensor).untyped_storage()
            found[storage._cdata] = storage
        return list(found.values())

    def device_bytes(self) -> int:
        """Measured on the storages of the live tensors."""
        own = 0 if self._engine is None else self._engine.own_bytes()
        return own + sum(int(storage.nbytes()) for storage in self.storages())

    def host_bytes(self) -> int:
        """Memory of the host that is kept for it."""
        own = 0 if self._engine is None else self._engine.residency().host
        return sum(swap.host_bytes for swap in self._swaps) + own

    # --- moving ------------------------------------------------------------------------------------------------------

    def leave(self, size: int, keep: bool, aside: bool = False) -> None:
        """`size` of the plan's bytes go: to the host, or with `keep` False away. What is fixed is always kept."""
        self.arrive()
        self.away_bytes = min(self.bytes, self.away_bytes + size)
        self._look()
        whole = sum(swap.num_bytes for swap in self._swaps)
        gone = sum(swap.num_bytes for swap in self._swaps if not swap.on_device)
        for swap in self._swaps:
            if gone * self.bytes >= self.away_bytes * whole:
                break
            if not swap.on_device:
                continue
            if self.fixed and swap.host_bytes:
                swap.drop(keep=True)
            elif keep or self.fixed:
                swap.offload(aside)
            else:
                swap.drop()
            gone += swap.num_bytes
        if self._engine is not None and not self._asleep:
            self._engine.sleep(1 if keep or self.fixed else 2)
            self._asleep = True

    def come(self, size: int, aside: bool = False) -> None:
        """`size` of the plan's bytes are back, with their values where they were kept."""
        self.away_bytes = max(0, self.away_bytes - size)
        whole = sum(swap.num_bytes for swap in self._swaps)
        gone = sum(swap.num_bytes for swap in self._swaps if not swap.on_device)
        for swap in reversed(self._swaps):
            if swap.on_device or (gone - swap.num_bytes) * self.bytes < self.away_bytes * whole:
                continue
            self._coming.append(swap.onload(aside))
            gone -= swap.num_bytes
        if self._engine is not None and self._asleep and not self.away_bytes:
            self._engine.wake(("weights",))  # staged: the cache's turn is when generation begins
            self._engine.wake(("kv",))
            self._asleep = False

    def arrive(self) -> None:
        """What is started from now on finds the values that are on their way."""
        for event in self._coming:
            event.wait()
        self._coming = []

    def _look(self) -> None:
        """Also the tensors that were not there the last time: moments are made at the first update."""
        for tensor in self._tensors():
            local = plain(tensor)
            storage = local.untyped_storage()
            if storage._cdata not in self._known and storage.nbytes():
                self._known.add(storage._cdata)
                self._swaps.append(Swap(self._device, [local]))


def parameters(trainer: Trainer) -> list[torch.Tensor]:
    """This rank's part of a model's weights, a value head included."""
    loaded = trainer.loaded
    head = [] if loaded.critic is None else list(loaded.critic.head.parameters())
    return [*loaded.model.parameters(), *head]


def moments(trainer: Trainer) -> list[torch.Tensor]:
    """What the optimizer keeps, and what it moves beside the weights themselves."""
    return [*trainer.moments(), *trainer.moved_tensors()]


def beside(tensors: Tensors, others: Sequence[Tensors]) -> Tensors:
    """Those of `tensors` that share no memory with `others`: what two objects of the table share counts once."""

    def found() -> Iterable[torch.Tensor]:
        taken = {plain(tensor).untyped_storage()._cdata for other in others for tensor in other()}
        return [tensor for tensor in tensors() if plain(tensor).untyped_storage()._cdata not in taken]

    return found
