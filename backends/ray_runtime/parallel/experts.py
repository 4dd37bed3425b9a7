"""Expert parallelism: every rank has some experts, or parts of them, and tokens travel to the experts they are for.

The ranks of `mesh.experts` hold every expert once: rank e x etp + y has the y-th part of the inner columns of the e-th
share of the experts. A token goes to all parts of its experts, and the parts of the answers are summed where it came
from (GShard, arXiv 2006.16668; tensor parallel experts as in arXiv 2104.04473). Tensor-parallel ranks have the same
tokens, so each routes a part of them; with sequence parallelism each has a part already.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlflow.backends.ray_runtime.parallel.collectives import exchange_rows, join_rows, split_rows
from rlflow.backends.ray_runtime.parallel.mesh import Mesh
from rlflow.backends.ray_runtime.parallel.weights import Rule, Spec


def shard_experts(decoder: Any, mesh: Mesh) -> None:
    """Cut the experts of every sparse layer in place, and put a `RoutedExperts` in the place of its block."""
    for layer in decoder.layers:
        if hasattr(getattr(layer, "mlp", None), "experts"):
            layer.mlp = RoutedExperts(layer.mlp, mesh)


class RoutedExperts(nn.Module):  # type: ignore[misc]
    """In the place of a sparse block of transformers, whose router and experts it keeps under their names."""

    def __init__(self, block: Any, mesh: Mesh) -> None:
        super().__init__()
        self.gate = block.gate
        self.experts = block.experts
        self._mesh = mesh
        layout = mesh.layout
        for name, rule in (("gate_up_proj", Rule.EXPERTS_UP), ("down_proj", Rule.EXPERTS_DOWN)):
            whole = getattr(self.experts, name)
            spec = Spec(name, tuple(whole.shape), rule, 0)
            part = torch.empty(spec.local_shape(layout), dtype=whole.dtype, device=whole.device)
            for at, mine in spec.boxes(layout, mesh.place):
                part[mine] = whole.detach()[at]
            setattr(self.experts, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        self._each = len(self.experts.gate_up_proj)
        """Experts of a rank."""
        self.experts.num_experts = self._each

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to the same."""
        mesh = self._mesh
        rows = hidden.reshape(-1, hidden.shape[-1])
        same = None if mesh.layout.sp else mesh.tp  # ranks that have the same rows
        own = split_rows(rows, same)
        _, scores, chosen = self.gate(own)
        mixed = self._routed(own, scores, chosen)
        return join_rows(mixed, len(rows), same).reshape(hidden.shape)

    def _routed(self, own: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The experts' answers, each times its score, summed per token: [tokens, hidden]. `scores`, `chosen`
        [tokens, k]."""
        group, parts = self._mesh.experts, self._mesh.layout.etp
        tokens = torch.arange(len(own), device=own.device).repeat_interleave(chosen.shape[1])
        expert, score = chosen.reshape(-1), scores.reshape(-1)
        first = expert // self._each * parts
        to = torch.cat([first + part for part in range(parts)])
        order = torch.argsort(to, stable=True)
        pair = order % len(expert) if len(expert) else order
        sent = torch.bincount(to, minlength=1 if group is None else group.size()).tolist()
        received = _counts(sent, group)
        travelling = exchange_rows(own[tokens[pair]], sent, received, group)
        ids = exchange_rows((expert % self._each)[pair, None], sent, received, group)
        answers = exchange_rows(self._answers(travelling, ids), received, sent, group)
        return torch.zeros_like(own).index_add(0, tokens[pair], (answers * score[pair, None]).to(own.dtype))

    def _answers(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Every row through this rank's expert `ids` int64 [rows, 1].

        A rank without rows computes one of zeros for nobody: the others wait for the gradients of what they sent it,
        and FSDP for its turn to gather the weights and to reduce their gradients.
        """
        none = not len(rows)
        if none:
            rows, ids = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), ids.new_zeros(1, 1)
        answers: torch.Tensor = self.experts(rows, ids, torch.ones_like(ids, dtype=rows.dtype))
        return answers[:0] if none else answers


def _counts(sent: list[int], group: dist.ProcessGroup | None) -> list[int]:
    """How many rows come from every rank."""
    if group is None:
        return sent
    found = torch.zeros(len(sent), dtype=torch.int64)
    dist.all_to_all_single(found, torch.tensor(sent), group=group)
    return [int(count) for count in found]
