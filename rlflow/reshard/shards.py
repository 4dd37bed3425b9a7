"""What every rank of a layout holds of every tensor.

Rank order: rank = ((p x dp + d) x cp + c) x tp + t. The experts of a pipeline stage lie on the same ranks in an order
of their own: local rank = (x x ep + e) x etp + y, x over the replicas of the experts.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import prod

from rlflow.ir.flow import Layout
from rlflow.reshard.boxes import Box, Shape
from rlflow.reshard.catalogue import Catalogue, Home, Rule, TensorSpec
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.legal import layout_problems
from rlflow.reshard.placements import Flat, Piece, Placement, R, S, Shard, concatenate
from rlflow.reshard.storage import FUSED_NAMES, Storage
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One tensor as a rank keeps it: of one canonical tensor, or of several that are fused."""

    name: str
    parts: tuple[TensorSpec, ...]
    dim: int = 0
    """The dimension along which fused parts are joined."""
    grouped: bool = False

    @property
    def structure(self) -> Hashable:
        return tuple(part.structure for part in self.parts), self.dim, self.grouped


Groups = tuple[tuple[tuple[Box, ...], tuple[int, ...]], ...]
"""Distinct shards of a tensor within a pipeline stage: (canonical boxes, local ranks that hold just these)."""


class Sharding:
    """One side of a reshard. ReshardError, with every clash, for a layout that cannot hold the model."""

    def __init__(self, catalogue: Catalogue, layout: Layout, storage: Storage | None = None) -> None:
        self.catalogue = catalogue
        self.layout = layout
        self.storage = storage or Storage()
        problems = layout_problems(catalogue, layout, self.storage)
        if problems:
            raise ReshardError(problems)
        self.stage_size = layout.dp * layout.cp * layout.tp
        self._stage_of_layer = {
            layer: stage for stage in range(layout.pp) for layer in layout.layers_of(stage, catalogue.layers)
        }
        self._local = {part.name: (local, i) for local in self._locals() for i, part in enumerate(local.parts)}
        self._shards: dict[Hashable, Shard] = {}
        self._groups: dict[Hashable, Groups] = {}

    # --- who holds what ----------------------------------------------------------------------------------------------

    def stages(self, spec: TensorSpec) -> tuple[int, ...]:
        """Pipeline stages that hold a tensor; empty where this side does not hold it at all."""
        last = self.layout.pp - 1
        if spec.home is Home.LAYER:
            assert spec.layer is not None
            return (self._stage_of_layer[spec.layer],)
        if spec.home is Home.HEAD:
            return (last,)
        if spec.home is Home.MTP:
            return (last,) if self.storage.mtp else ()
        also_last = self.catalogue.tied or (self.catalogue.has_mtp and self.storage.mtp)
        return tuple(sorted({0, last})) if also_last else (0,)

    def local(self, name: str) -> tuple[LocalTensor, int]:
        """The local tensor that has a canonical tensor, and the number of the latter among its parts."""
        return self._local[name]

    def groups(self, name: str) -> Groups:
        """Ranks with equal shards, together. Tensors of equal structure share the answer."""
        local, part = self._local[name]
        key = (local.structure, part)
        if key not in self._groups:
            alike: dict[tuple[int, int], list[int]] = {}
            for rank in range(self.stage_size):
                alike.setdefault(self._coordinates(local, rank), []).append(rank)
            members: dict[tuple[Box, ...], list[int]] = {}
            for ranks in alike.values():
                boxes = self._shard(local, ranks[0]).boxes(part)
                if boxes:
                    members.setdefault(boxes, []).extend(ranks)
            self._groups[key] = tuple((boxes, tuple(sorted(ranks))) for boxes, ranks in members.items())
        return self._groups[key]

    # --- one rank ----------------------------------------------------------------------------------------------------

    def holds(self, rank: int, name: str) -> bool:
        """Whether the rank's pipeline stage has the tensor."""
        return rank // self.stage_size in self.stages(self.catalogue[name])

    def shard(self, rank: int, local_name: str) -> Shard:
        """A local tensor of a rank: its shape, and what of which part lies where."""
        return self._shard(self.local_tensors(rank)[local_name], rank % self.stage_size)

    def pieces(self, rank: int, name: str) -> tuple[Piece, ...]:
        """Of a canonical tensor: which box lies where in the rank's local tensor; empty if it holds none."""
        if not self.holds(rank, name):
            return ()
        local, part = self._local[name]
        return tuple(p for p in self._shard(local, rank % self.stage_size).pieces if p.part == part)

    def local_tensors(self, rank: int) -> dict[str, LocalTensor]:
        """All local tensors of a rank by name, in catalogue order."""
        stage = rank // self.stage_size
        found = {}
        for spec in self.catalogue:
            local, _ = self._local[spec.name]
            if stage in self.stages(spec):
                found[local.name] = local
        return found

    def local_shape(self, rank: int, local: LocalTensor) -> Shape:
        """With padding."""
        return self._shard(local, rank % self.stage_size).shape

    def bytes_of(self, rank: int) -> int:
        """All weights of a rank, padding included."""
        elements = sum(prod(self.local_shape(rank, local)) for local in self.local_tensors(rank).values())
        return elements * self.storage.element_bytes

    # --- construction ------------------------------------------------------------------------------------------------

    def _locals(self) -> list[LocalTensor]:
        """Canonical tensors in order, those that this storage fuses gathered at the first of them."""
        found: dict[str, list[TensorSpec]] = {}
        for spec in self.catalogue:
            fuse = self.storage.qkv if spec.fused == "qkv" else self.storage.gate_up
            name = spec.name if not spec.fused or fuse == "separate" else _fused_name(spec)
            found.setdefault(name, []).append(spec)
        grouped = self.storage.qkv == "grouped"
        return [
            LocalTensor(name, tuple(parts), parts[0].dim, grouped and parts[0].fused == "qkv")
            for name, parts in found.items()
        ]

    def _shard(self, local: LocalTensor, rank: int) -> Shard:
        """Of the `rank`-th rank of a stage."""
        inside, replica = self._coordinates(local, rank)
        layout = self.layout
        expert = local.parts[0].rule is Rule.EXPERT
        replicas = layout.expert_replicas if expert else layout.dp * layout.cp
        key = (local.structure, inside, replica)
        if key not in self._shards:
            shard = self._joined(local, [self._part(part, inside) for part in local.parts])
            if layout.zero == 3:
                flat = self.storage.zero3 == "flat"
                cut: Placement = Flat.equal(shard, replicas, replica) if flat else S(0)
                shard = cut.apply(shard, replicas, replica)
            self._shards[key] = shard
        return self._shards[key]

    def _coordinates(self, local: LocalTensor, rank: int) -> tuple[int, int]:
        """What decides about a rank's part of a tensor: the tp coordinate (e x etp + y for experts), and the replica
        where ZeRO-3 cuts the part further."""
        layout = self.layout
        if local.parts[0].rule is Rule.EXPERT:
            replica, inside = divmod(rank, layout.ep * layout.etp)
        else:
            replica, inside = divmod(rank, layout.tp)
            if all(part.rule is Rule.REPLICATE for part in local.parts):
                inside = 0
        return inside, replica if layout.zero == 3 else 0

    def _part(self, spec: TensorSpec, inside: int) -> Shard:
        """Before fusion and ZeRO-3. `inside`: the tp coordinate, or e x etp + y for experts."""
        tp = self.layout.tp
        axes: tuple[tuple[Placement, int, int], ...]
        padded = None
        if spec.rule is Rule.EXPERT:
            expert, slice_ = divmod(inside, self.layout.etp)
            axes = ((S(0), self.layout.ep, expert), (S(spec.dim), self.layout.etp, slice_))
        elif spec.rule is Rule.KV and tp > spec.units:
            copies = tp // spec.units  # the axis tp is (heads, copies)
            axes = ((S(spec.dim), spec.units, inside // copies), (R(), copies, inside % copies))
        elif spec.rule is Rule.REPLICATE:
            axes = ((R(), tp, inside),)
        else:
            axes = ((S(spec.dim), tp, inside),)
            if spec.rule is Rule.VOCAB:
                padded = (self.storage.padded_vocabulary(spec.shape[0]), *spec.shape[1:])
        shard = Shard.of(spec.shape, padded)
        for placement, size, coordinate in axes:
            shard = placement.apply(shard, size, coordinate)
        return shard

    def _joined(self, local: LocalTensor, shards: list[Shard]) -> Shard:
        if len(shards) == 1:
            return shards[0]
        interleave = 1
        if local.grouped:
            heads = next(part.units for part in local.parts if part.rule is Rule.KV)
            interleave = max(heads // self.layout.tp, 1)
        return concatenate(shards, local.dim, interleave)


def _fused_name(spec: TensorSpec) -> str:
    before, _, kind = spec.name.rsplit(".", 2)
    return f"{before}.{FUSED_NAMES[spec.fused]}.{kind}"
