"""One rank's part of a model: cut in place by the layout, and how it comes from and goes back to the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlflow.backends.ray_runtime.adapters import plain_name
from rlflow.backends.ray_runtime.models import LoadedModel
from rlflow.backends.ray_runtime.parallel.experts import shard_experts
from rlflow.backends.ray_runtime.parallel.legal import refuse_impossible
from rlflow.backends.ray_runtime.parallel.mesh import Mesh, Place, new_group
from rlflow.backends.ray_runtime.parallel.recompute import recompute
from rlflow.backends.ray_runtime.parallel.stages import keep_own_layers
from rlflow.backends.ray_runtime.parallel.tensor import cut_positions, shard_decoder, shard_embedding, shard_head
from rlflow.backends.ray_runtime.parallel.weights import (
    EMBEDDING,
    HEAD,
    Spec,
    divides_experts,
    layer_of,
    of_adapter,
    reshard_views,
    specs_of,
)
from rlflow.reshard.placements import chunk


class ShardedModel:
    """Cuts `loaded.model` in place. Every rank of the mesh makes one, from the same whole model.

    RunFailure: RLF4003 for a layout that cannot run this model.
    """

    def __init__(self, loaded: LoadedModel, mesh: Mesh) -> None:
        refuse_impossible(loaded, mesh.layout)
        self.loaded = loaded
        self.mesh = mesh
        self.layout = mesh.layout
        self.specs = specs_of(loaded.model)
        """Of the whole model."""
        self.fsdp = mesh.layout.zero == 3 and (mesh.dp is not None or mesh.expert_dp is not None)
        if loaded.adapters is not None and (mesh.tp is not None or self.fsdp):
            loaded.adapters.leave_base()
        self._stage_of_layer: dict[int, int] = {}
        if self.layout.pp > 1:
            layers = len(loaded.model.get_decoder().layers)
            self._stage_of_layer = {
                layer: stage for stage in range(self.layout.pp) for layer in self.layout.layers_of(stage, layers)
            }
        self.kv_copies: dist.ProcessGroup | None = None
        """The ranks that hold the same key-value heads, where there are fewer heads than tensor-parallel ranks."""
        self._end_stages = {0}
        """Those that hold the embedding: the last too where the head is tied to it."""
        self.virtual_stages: list[tuple[int, Any]] = []
        """Of a pipeline rank: (number, decoder), see stages.py."""
        self._cut()
        self.parameters: dict[str, nn.Parameter] = {}
        """Of this rank by their names in the whole model: the leaves that backward gives gradients."""
        self.refresh()

    # --- the cut -----------------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        model, mesh, layout = self.loaded.model, self.mesh, self.layout
        if layout.size == 1 and layout.recompute == "none":
            return
        decoder = model.get_decoder()
        tied = any(_is_embedding(name) for name in self.specs) and hasattr(model, "lm_head") and HEAD not in self.specs
        if layout.pp > 1:
            self._end_stages = {0, layout.pp - 1} if tied else {0}
            self.virtual_stages = keep_own_layers(model, mesh)
        if divides_experts(layout):
            shard_experts(decoder, mesh)
        recompute(decoder, layout.recompute)
        if mesh.tp is not None:
            device_mesh = mesh.device_mesh(str(model.device.type))
            device_mesh = device_mesh["tp"] if device_mesh.ndim > 1 else device_mesh
            shard_decoder(decoder, mesh, device_mesh)
            if layout.sp:
                for part in [part for _, part in self.virtual_stages] or [decoder]:
                    cut_positions(part, mesh.tp)
            if mesh.first_stage:
                shard_embedding(decoder, device_mesh)
            if hasattr(model, "lm_head") and mesh.last_stage:
                shared = decoder.embed_tokens.weight if tied and layout.pp == 1 else None
                shard_head(model, shared, device_mesh, mesh.tp)
            self.kv_copies = self._kv_copies()

    def _kv_copies(self) -> dist.ProcessGroup | None:
        kv_heads = int(self.loaded.model.config.num_key_value_heads)
        copies = self.layout.tp // kv_heads
        if copies < 2:
            return None
        members = self.mesh.members(lambda p: (p.pp, p.dp, p.cp, p.tp // copies))
        return new_group(members, "kv copies", self.mesh.timeout)

    def refresh(self) -> None:
        """Look up the parameters again, after FSDP has put others in their place."""
        found = dict(self.loaded.model.named_parameters())
        if HEAD in found and HEAD not in self.specs:
            found[EMBEDDING] = found.pop(HEAD)  # the last pipeline stage of a tied model
        self.parameters = found

    # --- live views --------------------------------------------------------------------------------------------------

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """Live views of this rank's weights, or of the adapters that are trained instead, with the names and shapes of
        `rlflow.reshard.shards.Sharding`."""
        if self.loaded.adapters is not None:
            return self.loaded.adapters.tensors()
        return {
            canonical: view
            for name, parameter in self.parameters.items()
            for canonical, view in reshard_views(name, plain(parameter))
        }

    def load_full(self, state: Mapping[str, torch.Tensor]) -> None:
        """Overwrite this rank's weights from those of the whole model, under the names of its state dict; of a model
        with adapters these alone."""
        for name, parameter in self.parameters.items():
            if self._frozen(name):
                continue
            target = plain(parameter)
            with torch.no_grad():
                for whole, mine in self._pieces(self.specs[name], self.mesh.place):
                    target[mine] = state[name][whole].to(target)

    def full_tensors(self, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every weight of the whole model, float32 on the CPU of the mesh's first rank, None on the others. Without
        `frozen` those of a model with adapters are left out.

        Collective: all ranks of the mesh go through all of it. One tensor is there at a time.
        """
        for name, spec in self.specs.items():
            if not frozen and self._frozen(name):
                continue
            whole = torch.zeros(spec.shape) if self.mesh.rank == 0 else None
            for rank, pieces in self._senders(spec):
                if self.mesh.rank == rank:
                    local = plain(self.parameters[name]).detach().float().cpu().contiguous()
                    if rank:
                        dist.send(local, dst=self.mesh.ranks[0])
                elif self.mesh.rank == 0:
                    local = torch.empty(self._local_shape(spec, Place.of(self.layout, rank)))
                    dist.recv(local, src=self.mesh.ranks[rank])
                if whole is not None:
                    for at, mine in pieces:
                        whole[at] = local[mine]
            yield name, whole

    def _frozen(self, name: str) -> bool:
        """Whether adapters are trained in its place."""
        return self.loaded.adapters is not None and not of_adapter(name)

    def _senders(self, spec: Spec) -> Iterator[tuple[int, list[tuple[Any, Any]]]]:
        """One rank for every distinct part of a weight, and the part's pieces."""
        seen = set()
        for rank in range(self.mesh.size):
            place = Place.of(self.layout, rank)
            if place.pp not in self.stages(spec.name)[:1]:
                continue
            pieces = self._pieces(spec, place)
            if pieces and (key := repr(pieces)) not in seen:
                seen.add(key)
                yield rank, pieces

    def stages(self, name: str) -> tuple[int, ...]:
        """The pipeline stages that hold a weight."""
        if self.layout.pp == 1:
            return (0,)
        if _is_embedding(name):
            return tuple(sorted(self._end_stages))
        layer = layer_of(name)
        return (self.layout.pp - 1,) if layer is None else (self._stage_of_layer[layer],)

    def _rows(self, spec: Spec, place: Place) -> tuple[int, int]:
        """[low, high) of dimension 0 of the local weight that ZeRO-3 leaves to the rank."""
        extent = spec.local_shape(self.layout)[0]
        if not self.fsdp or of_adapter(spec.name):
            return 0, extent
        if spec.rule.of_experts:
            return chunk(extent, self.layout.expert_replicas, place.expert_replica)
        return chunk(extent, self.layout.dp, place.dp)

    def _local_shape(self, spec: Spec, place: Place) -> tuple[int, ...]:
        low, high = self._rows(spec, place)
        return (high - low, *spec.local_shape(self.layout)[1:])

    def _pieces(self, spec: Spec, place: Place) -> list[tuple[Any, Any]]:
        """`Spec.boxes` of what ZeRO-3 leaves to the rank."""
        low, high = self._rows(spec, place)
        found = []
        for whole, mine in spec.boxes(self.layout, place):
            first, last = max(mine[0].start, low), min(mine[0].stop, high)
            if first < last:
                move = whole[0].start - mine[0].start
                found.append(
                    ((slice(first + move, last + move), *whole[1:]), (slice(first - low, last - low), *mine[1:]))
                )
        return found

    def pieces(self, name: str) -> list[tuple[Any, Any]]:
        """(box of a whole weight, box of this rank's), which tile what the rank has of it."""
        return self._pieces(self.specs[name], self.mesh.place)

    def share(self, other: ShardedModel) -> int:
        """Take the tensors of `other`, a model with adapters whose frozen weights this one has, cut over the same mesh,
        in place of its own. Returns how many; none under FSDP, which has memory of its own for each."""
        if self.mesh is not other.mesh or self.fsdp:
            return 0
        theirs = {plain_name(name): parameter for name, parameter in other.parameters.items()}
        taken = {id(parameter): theirs[name] for name, parameter in self.parameters.items()}
        for module in self.loaded.model.modules():
            for key, parameter in module._parameters.items():
                if id(parameter) in taken:
                    module._parameters[key] = taken[id(parameter)]
        self.refresh()
        return len(taken)

    # --- what gradients mean -----------------------------------------------------------------------------------------

    def sharded_over_replicas(self, name: str) -> bool:
        """Whether FSDP has reduced the gradient of a weight over data parallelism already, and holds a part of it."""
        group = self.mesh.expert_dp if self.specs[name].rule.of_experts else self.mesh.dp
        return self.fsdp and group is not None and not of_adapter(name)


def _is_embedding(name: str) -> bool:
    return name.endswith("embed_tokens.weight")


def plain(parameter: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, or the tensor itself: the same memory, without a gradient."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
