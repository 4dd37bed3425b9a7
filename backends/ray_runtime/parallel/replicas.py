"""ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): what data-parallel ranks need not all hold.

Stage 3 is torch's FSDP2. Stages 1 and 2 leave the weights whole: a rank has the optimizer state of its part of one flat
vector of weights, and gets the gradients of just that part, once per update (1) or after every micro-batch (2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from rlflow.backends.ray_runtime.parallel.collectives import gather_into, scatter_sum
from rlflow.backends.ray_runtime.parallel.mesh import Mesh


def shard_weights(root: nn.Module, decoder: Any, mesh: Mesh, ignored: set[nn.Parameter]) -> None:
    """FSDP2 in place: every layer gathered for itself, and the rest around all of them.

    Gradients become sums over data parallelism. `ignored` stay as they are.
    """
    device = next(root.parameters()).device.type
    for layer in decoder.layers:
        experts = getattr(layer.mlp, "experts", None)
        if isinstance(experts, nn.Module):
            if mesh.expert_dp is None:
                ignored = ignored | set(experts.parameters())
            else:
                _shard(experts, DeviceMesh.from_group(mesh.expert_dp, device), set())
        if mesh.dp is not None:
            _shard(layer, _over_dp(mesh, device), ignored)
    if mesh.dp is not None:
        _shard(root, _over_dp(mesh, device), ignored)


def _over_dp(mesh: Mesh, device: str) -> DeviceMesh:
    whole = mesh.device_mesh(device)
    return whole["dp"] if whole.ndim > 1 else whole


def _shard(module: nn.Module, device_mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    fully_shard(module, mesh=device_mesh, reshard_after_forward=True, ignored_params=ignored)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


class Weight(Protocol):
    local: nn.Parameter
    share: float


W = TypeVar("W", bound=Weight)


class FlatPart(Generic[W]):
    """Some weights as one vector, of which every rank of a group moves an equal part."""

    def __init__(self, weights: Sequence[W], group: dist.ProcessGroup) -> None:
        self.weights = list(weights)
        self._group = group
        self._sizes = [weight.local.numel() for weight in weights]
        self._length = -(-sum(self._sizes) // group.size())
        self._low = self._length * group.rank()
        first = self.weights[0].local
        self.part = nn.Parameter(torch.zeros(self._length, dtype=first.dtype, device=first.device))
        """Elements [rank x length, (rank + 1) x length); what lies beyond the end is padding."""

    def add_gradients(self) -> None:
        """Add the sum over the group of all ranks' gradients to the part's, and drop those of the weights."""
        found = torch.empty_like(self.part)
        gradients = [w.local.grad for w in self.weights]
        scatter_sum(found, self._flat(gradients), group=self._group)
        if self.part.grad is None:
            self.part.grad = found
        else:
            self.part.grad += found
        for weight in self.weights:
            weight.local.grad = None

    def take_weights(self) -> None:
        """Before a step: the part as the weights are, whoever wrote them."""
        flat = self._flat([weight.local.detach() for weight in self.weights])
        self.part.detach().copy_(flat[self._low : self._low + self._length])

    def give_weights(self) -> None:
        """After a step: every rank's part into the weights of all."""
        flat = self.part.new_empty(self._length * self._group.size())
        gather_into(flat, self.part.detach(), group=self._group)
        start = 0
        for weight, size in zip(self.weights, self._sizes, strict=True):
            weight.local.detach().copy_(flat[start : start + size].view_as(weight.local))
            start += size

    def parts(self) -> Iterator[tuple[W, int, int, int]]:
        """Weights that the part has elements [low, high) of, which lie from `at` on: (weight, low, high, at)."""
        start = -self._low
        for weight, size in zip(self.weights, self._sizes, strict=True):
            low, high = max(start, 0), min(start + size, self._length)
            if low < high:
                yield weight, low - start, high - start, low
            start += size

    def gradients(self) -> list[tuple[torch.Tensor, float]]:
        """The part's gradient cut where one weight ends, each with the share of that weight that is this rank's own."""
        gradient = self.part.grad
        assert gradient is not None
        share = self._group.size()
        return [(gradient[at : at + high - low], weight.share * share) for weight, low, high, at in self.parts()]

    def _flat(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = self.part.new_zeros(self._length * self._group.size())
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat[: sum(self._sizes)])
        return flat
