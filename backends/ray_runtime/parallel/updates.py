"""Gradients of a model that is spread over ranks: summed where ranks did parts of the work, their norm over all of it,
and the tensors that an optimizer moves.

Losses have denominators of the whole mini-batch, so gradients are sums over ranks, never means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlflow.backends.ray_runtime.parallel.mesh import Mesh
from rlflow.backends.ray_runtime.parallel.regions import Region, boxes, whole_region
from rlflow.backends.ray_runtime.parallel.replicas import FlatPart
from rlflow.backends.ray_runtime.parallel.sharded import ShardedModel, plain
from rlflow.backends.ray_runtime.parallel.weights import EMBEDDING, Rule, Spec, summed_over_tp

CRITIC = "critic.head"
"""Before the numbers of the parameters that a shared critic adds to its model's."""


class Updates:
    """What an update does beside the loss, for a model that is whole on every rank."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = list(parameters)
        self.leaves = list(parameters.values())
        """What backward gives gradients."""
        self.moved = self.leaves
        """What the optimizer moves."""

    def begin(self) -> None:
        """Before a mini-batch."""
        for parameter in self.leaves:
            parameter.grad = None

    def after_backward(self) -> None:
        """After a micro-batch."""

    def reduce(self, group: dist.ProcessGroup | None) -> torch.Tensor:
        """The sum of the gradients over data parallelism into `moved`, and their norm over everything."""
        if group is not None:
            for parameter in self.leaves:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            flat = torch.cat([p.grad.reshape(-1) for p in self.leaves])
            dist.all_reduce(flat, group=group)
            start = 0
            for parameter in self.leaves:
                parameter.grad.copy_(flat[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()
        return torch.nn.utils.get_total_norm([p.grad for p in self.leaves if p.grad is not None])

    def after_step(self) -> None:
        """After the optimizer moved `moved`."""

    def regions(self) -> list[list[Region]]:
        """For every tensor of `moved`: what it has of the model's weights, padding left out."""
        return [[whole_region(n, tuple(p.shape))] for n, p in zip(self._names, self.leaves, strict=True)]


@dataclass
class _Slot:
    """One weight of this rank."""

    leaf: nn.Parameter
    local: nn.Parameter
    """The same memory as a plain tensor."""
    sums: tuple[dist.ProcessGroup, ...]
    """Groups over which its gradient is to be summed, beside data parallelism."""
    replicas: dist.ProcessGroup | None
    """Data parallelism that has not been summed over by FSDP."""
    share: float
    """1 / number of ranks that hold the same elements, replicas counted where each has all of them."""
    regions: tuple[Region, ...]
    """Of the local weight."""

    def gradient(self) -> torch.Tensor:
        grad = self.leaf.grad
        if grad is None:
            return torch.zeros_like(self.local)
        if isinstance(grad, DTensor):
            assert isinstance(self.leaf, DTensor)
            if grad.placements != self.leaf.placements:
                grad = grad.redistribute(placements=self.leaf.placements)
            return grad.to_local()
        return grad


class ShardedUpdates(Updates):
    """For a model cut by `ShardedModel`; `extra`: parameters beside it that every rank has whole."""

    def __init__(self, sharded: ShardedModel, extra: Sequence[nn.Parameter] = ()) -> None:
        self.mesh = sharded.mesh
        self._slots = [
            _slot(sharded, sharded.specs[name], leaf) for name, leaf in sharded.parameters.items() if leaf.requires_grad
        ]
        for leaf in extra:
            spec = Spec("", tuple(leaf.shape), Rule.WHOLE, 0)
            self._slots.append(_slot(sharded, spec, leaf))
        names = [n for n, leaf in sharded.parameters.items() if leaf.requires_grad]
        names += [f"{CRITIC}.{number}" for number in range(len(extra))]
        for name, slot in zip(names, self._slots, strict=True):
            slot.regions = tuple(_regions(sharded, name, slot))
        super().__init__({name: slot.leaf for name, slot in zip(names, self._slots, strict=True)})
        self._zero = sharded.layout.zero
        self._flats = self._flat_parts() if self._zero in (1, 2) else []
        self.moved = [slot.local for slot in self._whole()] + [flat.part for flat in self._flats]

    def begin(self) -> None:
        super().begin()
        for slot in self._slots:
            slot.local.grad = None
        for flat in self._flats:
            flat.part.grad = None

    def after_backward(self) -> None:
        if self._zero == 2:
            self._sum_parts()
            for flat in self._flats:
                flat.add_gradients()
            for slot in self._slots:
                if slot.replicas is not None:
                    slot.leaf.grad = None

    def reduce(self, group: dist.ProcessGroup | None) -> torch.Tensor:
        if self._zero != 2:
            self._sum_parts()
        self._sum([(slot, slot.replicas) for slot in self._whole() if slot.replicas is not None])
        found = [(slot.local.grad, slot.share) for slot in self._whole()]
        for flat in self._flats:
            if self._zero == 1:
                flat.add_gradients()
            flat.take_weights()
            found += flat.gradients()
        for slot in self._slots:
            slot.leaf.grad = None  # the optimizer reads the local one
        return _norm(found, self.mesh)

    def after_step(self) -> None:
        for flat in self._flats:
            flat.give_weights()

    def regions(self) -> list[list[Region]]:
        found = [list(slot.regions) for slot in self._whole()]
        for flat in self._flats:
            found.append([r for slot, low, high, at in flat.parts() for r in _flat_regions(slot, low, high, at)])
        return found

    def _sum_parts(self) -> None:
        """Gradients as plain tensors, whole where ranks of one replica did parts of the work."""
        for slot in self._slots:
            slot.local.grad = slot.gradient()
        for depth in range(max((len(slot.sums) for slot in self._slots), default=0)):
            self._sum([(slot, slot.sums[depth]) for slot in self._slots if depth < len(slot.sums)])

    def _whole(self) -> list[_Slot]:
        """Weights that this rank moves itself."""
        inside = {id(weight) for flat in self._flats for weight in flat.weights}
        return [slot for slot in self._slots if id(slot) not in inside]

    def _flat_parts(self) -> list[FlatPart[_Slot]]:
        by_group: dict[str, tuple[dist.ProcessGroup, list[_Slot]]] = {}
        for slot in self._slots:
            if slot.replicas is not None:
                by_group.setdefault(slot.replicas.group_name, (slot.replicas, []))[1].append(slot)
        return [FlatPart(slots, group) for group, slots in by_group.values()]

    def _sum(self, wanted: list[tuple[_Slot, dist.ProcessGroup]]) -> None:
        """All-reduce, one message a group. Groups come in an order that all of their members agree on."""
        by_group: dict[str, tuple[dist.ProcessGroup, list[_Slot]]] = {}
        for slot, group in wanted:
            by_group.setdefault(group.group_name, (group, []))[1].append(slot)
        for group, slots in by_group.values():
            flat = torch.cat([slot.local.grad.reshape(-1) for slot in slots])
            dist.all_reduce(flat, group=group)
            start = 0
            for slot in slots:
                size = slot.local.numel()
                slot.local.grad = flat[start : start + size].view_as(slot.local).clone()
                start += size


def _slot(sharded: ShardedModel, spec: Spec, leaf: nn.Parameter) -> _Slot:
    mesh, layout = sharded.mesh, sharded.layout
    sums: list[dist.ProcessGroup] = []
    holders = spec.holders(layout)
    if spec.rule is Rule.KV and sharded.kv_copies is not None:
        sums.append(sharded.kv_copies)
    if mesh.tp is not None and summed_over_tp(spec.name, layout):
        sums.append(mesh.tp)
    if spec.name == EMBEDDING and len(sharded.stages(EMBEDDING)) > 1:
        assert mesh.ends is not None
        sums.append(mesh.ends)
        holders *= 2
    if not spec.name and mesh.pp is not None:  # a value head beside the model: its estimates are the last stage's
        sums.append(mesh.pp)
        holders *= layout.pp
    replicas = mesh.expert_dp if spec.rule.of_experts else mesh.dp
    if spec.name and sharded.sharded_over_replicas(spec.name):
        assert replicas is not None
        holders //= replicas.size()
        replicas = None
    return _Slot(leaf, nn.Parameter(plain(leaf)), tuple(sums), replicas, 1.0 / holders, ())


def _regions(sharded: ShardedModel, name: str, slot: _Slot) -> Iterator[Region]:
    """What a local weight is of the whole one."""
    if name not in sharded.specs:
        yield whole_region(name, tuple(slot.local.shape), first=sharded.mesh.first_stage)
        return
    first = sharded.mesh.pp_rank == sharded.stages(name)[0]
    for whole, mine in sharded.pieces(name):
        yield Region(name, sharded.specs[name].shape, tuple(cut.start for cut in whole), mine, first=first)


def _flat_regions(slot: _Slot, low: int, high: int, at: int) -> Iterator[Region]:
    """What the elements [low, high) of a local weight, which lie from `at` on in a vector, are of the whole one."""
    shape = tuple(slot.local.shape)
    for box in boxes(shape, low, high):
        size = math.prod(cut.stop - cut.start for cut in box)
        view = tuple(cut.stop - cut.start for cut in box)
        for region in slot.regions:
            cuts = [(max(b.start, r.start), min(b.stop, r.stop)) for b, r in zip(box, region.inside, strict=True)]
            if all(begin < end for begin, end in cuts):
                offsets = tuple(
                    o + begin - r.start for o, (begin, _), r in zip(region.offsets, cuts, region.inside, strict=True)
                )
                inside = tuple(slice(begin - b.start, end - b.start) for (begin, end), b in zip(cuts, box, strict=True))
                yield Region(region.name, region.shape, offsets, inside, (at, at + size), view, region.first)
        at += size


def _norm(parts: list[tuple[torch.Tensor, float]], mesh: Mesh) -> torch.Tensor:
    """Euclidean norm over all elements of the whole model, each counted once; the same float on every rank."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient, share in parts:
        total += share * float(torch.linalg.vector_norm(gradient)) ** 2
    dist.all_reduce(total, group=mesh.world)
    return total.sqrt().float()
