"""The head of a model whose vocabulary is divided over tensor-parallel ranks.

Rows are padded to equal parts; a padding row is never a token, and its weights stay 0.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from rlflow.backends.ray_runtime.parallel.collectives import enter, join_rows, leave

Spread = Literal["none", "value", "gradient"]


def padded_rows(vocabulary: int, parts: int) -> int:
    return -(-vocabulary // parts) * parts


class VocabularyHead(nn.Module):  # type: ignore[misc]
    """`weight`: this rank's rows of the padded matrix, a DTensor or plain [padded / ranks, hidden]."""

    def __init__(self, weight: nn.Parameter, vocabulary: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = weight
        self.vocabulary = vocabulary
        self.group = group
        self.rows = padded_rows(vocabulary, group.size()) // group.size()
        self.first = self.rows * group.rank()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the whole vocabulary: [..., vocabulary] on every rank."""
        local = self.local_logits(hidden)
        columns = join_rows(local.movedim(-1, 0), self.rows * self.group.size(), self.group)
        return columns[: self.vocabulary].movedim(0, -1)

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., rows]; those of padding rows are -inf."""
        local = functional.linear(enter(hidden, self.group), _local(self.weight))
        real = self.vocabulary - self.first
        if real < self.rows:
            padding = torch.arange(self.rows, device=local.device) >= real
            local = local.masked_fill(padding, float("-inf"))
        return local

    def log_probs(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, spread: Spread
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of every target and entropy (nats), float32 [tokens] each, the latter if asked for.

        No rank sees the whole row of logits: their maximum, the sum of exponentials, the target's logit and the mean
        of the logits are what goes between ranks.
        """
        local = self.local_logits(hidden).float()
        if temperature not in (0.0, 1.0):
            local = local / temperature
        peak = local.detach().amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.group)
        shifted = local - peak[:, None]
        weights = shifted.exp()
        log_total = leave(weights.sum(-1), self.group).log()
        index = targets - self.first
        inside = (index >= 0) & (index < self.rows)
        mine = shifted.gather(1, index.clamp(0, self.rows - 1)[:, None])[:, 0]
        logp = leave(mine.masked_fill(~inside, 0.0), self.group) - log_total
        if spread == "none":
            return logp, logp.new_zeros(0)
        if spread == "value":
            weights, shifted, log_total = weights.detach(), shifted.detach(), log_total.detach()
        mean = leave((weights * shifted.masked_fill(torch.isinf(shifted), 0.0)).sum(-1), self.group)
        return logp, log_total - mean / log_total.exp()


def _local(weight: Any) -> torch.Tensor:
    """The plain tensor of a DTensor; its gradient goes back to the DTensor."""
    return weight.to_local() if hasattr(weight, "to_local") else weight
