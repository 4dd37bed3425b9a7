"""Layers of which a rank holds a part, for sampling: no gradients, the input and the output are the same on all ranks.

Column-parallel layers (q, k, v, gate, up) are plain linear layers with fewer rows. The partial sums of the layers
behind them are added over the group (Shoeybi et al. 2019, arXiv 1909.08053).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def add_up(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the group, in place of this rank's summand."""
    dist.all_reduce(partial, group=group)
    return partial


class RowParallel(nn.Linear):  # type: ignore[misc]
    """A linear layer of which the rank has some columns of the weight, hence only these features of the input."""

    def __init__(self, weight: torch.Tensor, group: dist.ProcessGroup) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return add_up(F.linear(x, self.weight), self.group)


class VocabularyEmbedding(nn.Module):  # type: ignore[misc]
    """Rows `first`, `first` + 1, ... of an embedding, those of padding included."""

    def __init__(self, weight: torch.Tensor, first: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.first = first
        self.group = group

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., hidden]"""
        local = ids - self.first
        absent = (local < 0) | (local >= len(self.weight))
        found = F.embedding(local.masked_fill(absent, 0), self.weight).masked_fill(absent[..., None], 0.0)
        return add_up(found, self.group)


class VocabularyHead(nn.Module):  # type: ignore[misc]
    """Some rows of the output head; every rank gets the logits of all `vocabulary` tokens, without the padding."""

    def __init__(self, weight: nn.Parameter, vocabulary: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = weight
        self.vocabulary = vocabulary
        self.group = group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., vocabulary], the same bits on every rank: each logit is computed on one."""
        mine = F.linear(hidden, self.weight)
        every = mine.new_empty(self.group.size(), *mine.shape)
        dist.all_gather(list(every.unbind(0)), mine.contiguous(), group=self.group)
        return every.movedim(0, -2).flatten(-2)[..., : self.vocabulary]


class Matrix(nn.Module):  # type: ignore[misc]
    """A weight with the name that a checkpoint gives it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class LocalExperts(nn.Module):  # type: ignore[misc]
    """Some experts of a layer, or a part of each, in place of transformers' module of all of them.

    Every rank of the group has all tokens. Where the group holds the experts `copies` times, each copy takes the tokens
    whose number leaves `copy` when divided by `copies`; the sum over the group is that over the experts.
    """

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        act: nn.Module,
        first: int,
        copy: int,
        copies: int,
        group: dist.ProcessGroup,
    ) -> None:
        """`gate` and `up` [experts, width, hidden], `down` [experts, hidden, width]; `first`: number of the first."""
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = Matrix(gate), Matrix(up), Matrix(down)
        self.act = act
        self.first, self.copy, self.copies, self.group = first, copy, copies, group

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`hidden` [tokens, hidden]; `chosen` int64 and `weights` [tokens, experts per token]."""
        out = torch.zeros_like(hidden)
        local = chosen - self.first
        if self.copies > 1:
            mine = torch.arange(len(hidden), device=hidden.device) % self.copies == self.copy
            local = local.masked_fill(~mine[:, None], -1)
        held = torch.unique(local).tolist()
        for expert in (e for e in held if 0 <= e < len(self.gate_proj.weight)):
            token, slot = torch.where(local == expert)
            x = hidden[token]
            gate, up = (F.linear(x, part.weight[expert]) for part in (self.gate_proj, self.up_proj))
            y = F.linear(self.act(gate) * up, self.down_proj.weight[expert])
            out.index_add_(0, token, (y * weights[token, slot, None]).to(out.dtype))
        return add_up(out, self.group)


def group_of(module: nn.Module) -> dist.ProcessGroup | None:
    """The group over which a model's output projections are added up; None for a whole model."""
    found = next((m for m in module.modules() if isinstance(m, RowParallel)), None)
    return None if found is None else cast("dist.ProcessGroup", found.group)
