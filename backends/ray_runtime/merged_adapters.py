"""The weights with adapters that an engine samples from where the adapters come from elsewhere: from another pool, or
from a trainer on this one that has other parts of the model.

What comes is A and B alone. The rank keeps, of the adapted layers, the frozen weights in float32, and at the end of
every update writes W + (alpha / rank) B A anew over what the engine has of them, so that rounding does not add up.
Nothing of it is shared with a trainer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlflow.backends.ray_runtime.adapters import Adapters, add_adapter, bit_sum, check_shapes, read_adapters
from rlflow.backends.ray_runtime.local_weights import catalogue_of, cut, fill, whole_tensors
from rlflow.backends.ray_runtime.parallel.mesh import Mesh
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.reshard.adapters import adapter_layout, adapters_of
from rlflow.reshard.catalogue import Catalogue
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import Storage


class MergedAdapters:
    """Of one engine. `into`: its weights by name, which `merge` writes; `mesh`: of the engine, None where it is whole.

    Made from a whole model. RunFailure RLF4003 where the adapted layers are others than `rlflow.reshard` knows.
    """

    def __init__(self, adapters: Adapters, mesh: Mesh | None, into: Mapping[str, torch.Tensor]) -> None:
        self._shapes = adapters.shapes
        self._sharding: Sharding | None = None
        self._rank = 0
        layers = adapters.layers
        self._scaling = {name: adapters.scaling(name) for name in layers}
        whole, frozen = adapters.tensors(), whole_tensors(adapters.base)
        missing = [name for name in layers if f"{name}.weight" not in into]
        if missing:
            raise unknown_layers(adapters.base, missing)
        if mesh is None or mesh.tp is None:
            self.tensors = {name: tensor.clone() for name, tensor in whole.items()}
            self._base = {name: frozen[f"{name}.weight"].clone() for name in layers}
        else:
            known = catalogue_of(adapters.base.config)
            small = known_adapters(adapters, known)
            layout, self._rank = mesh.layout, mesh.rank
            self._sharding = Sharding(small, adapter_layout(layout), Storage(mtp=False))
            weights = Sharding(known, layout, Storage(vocabulary_multiple=layout.tp, mtp=False))
            self.tensors = {name: cut(self._sharding, mesh.rank, name, whole, torch.float32) for name in whole}
            self._base = {name: cut(weights, mesh.rank, f"{name}.weight", frozen, torch.float32) for name in layers}
        self._into = {name: into[f"{name}.weight"] for name in layers}
        self._seen = self._bits()
        self.changed = False
        """Whether the last merge was of other adapters than the one before."""

    @property
    def memory(self) -> list[torch.Tensor]:
        """All that is kept beside the engine's weights."""
        return [*self.tensors.values(), *self._base.values()]

    def parts(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The frozen weights of the adapted layers, and what is written over: the sums."""
        return list(self._base.values()), list(self._into.values())

    def merge(self) -> str:
        """Write the sum over the engine's weights, in their own precision; returns the digest of it in float32, which
        is that of `Adapters.write_merged` where the model is whole."""
        digest = hashlib.sha256()
        with torch.no_grad():
            for name, into in self._into.items():
                a, b = (self.tensors[f"{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
                weight = add_adapter(self._base[name], a, b, self._scaling[name])
                into.copy_(weight)
                digest.update(bit_sum(name, weight))
        seen, self._seen = self._seen, self._bits()
        self.changed = seen != self._seen
        return digest.hexdigest()

    def load(self, folder: Path) -> None:
        """Take this rank's part of the adapters of a checkpoint; `merge` is still to come. ValueError for adapters of
        another model."""
        saved = read_adapters(folder)
        check_shapes(folder, saved, self._shapes)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if self._sharding is None:
                    tensor.copy_(saved[name])
                else:
                    fill(self._sharding, self._rank, name, saved, tensor)

    def _bits(self) -> bytes:
        return b"".join(bit_sum(name, tensor) for name, tensor in self.tensors.items())


def known_adapters(adapters: Adapters, known: Catalogue) -> Catalogue:
    """A and B of a model as `rlflow.reshard` divides them. RLF4003 where these are not those that the model has."""
    found = adapters_of(known, adapters.lora)
    if {spec.name: spec.shape for spec in found} != adapters.shapes:
        names = {spec.name for spec in found} ^ adapters.shapes.keys()
        raise unknown_layers(adapters.base, sorted({name.rsplit(".", 2)[0] for name in names}))
    return found


def unknown_layers(model: PreTrainedModel, layers: list[str]) -> RunFailure:
    """For adapters on layers without rules."""
    return RunFailure(
        "RLF4003",
        f"adapters of a model of type `{model.config.model_type}` cannot be moved to another pool or layout yet",
        notes=(f"no rule says how the adapter of `{layers[0]}` is divided",) if layers else (),
        help=("place what samples from it with its training, in the same layout",),
    )
