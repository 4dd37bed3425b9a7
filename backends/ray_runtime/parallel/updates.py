"""Gradients of a model that is spread over ranks: summed where ranks did parts of the work, their norm over all of it,
and the tensors that an optimizer moves.

Losses have denominators of the whole mini-batch, so gradients are sums over ranks, never means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlflow.backends.ray_runtime.parallel.mesh import Mesh
from rlflow.backends.ray_runtime.parallel.replicas import FlatPart
from rlflow.backends.ray_runtime.parallel.sharded import ShardedModel, plain
from rlflow.backends.ray_runtime.parallel.weights import EMBEDDING, Rule, Spec, summed_over_tp


class Updates:
    """What an update does beside the loss, for a model that is whole on every rank."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.leaves = list(parameters)
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
        super().__init__([slot.leaf for slot in self._slots])
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

    def _flat_parts(self) -> list[FlatPart]:
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
    return _Slot(leaf, nn.Parameter(plain(leaf)), tuple(sums), replicas, 1.0 / holders)


def _norm(parts: list[tuple[torch.Tensor, float]], mesh: Mesh) -> torch.Tensor:
    """Euclidean norm over all elements of the whole model, each counted once; the same float on every rank."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient, share in parts:
        total += share * float(torch.linalg.vector_norm(gradient)) ** 2
    dist.all_reduce(total, group=mesh.world)
    return total.sqrt().float()
