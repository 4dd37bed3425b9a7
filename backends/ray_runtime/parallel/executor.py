"""Runs a model over micro-batches: forward alone, or forward, loss and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rlflow.backends.ray_runtime.forward import Compute, Spread, hidden_log_probs, response_hidden
from rlflow.backends.ray_runtime.heads import ValueHeadModel
from rlflow.backends.ray_runtime.packing import MicroBatch, Sequences
from rlflow.backends.ray_runtime.parallel.packed import allow_packed
from rlflow.backends.ray_runtime.shared_prompts import shared_micro_batches, worth_sharing

Prediction = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Predictions [tokens] that carry the gradient, the policy's entropies if asked for, and the estimates [tokens] of a
value head on the policy's own body, from the same pass through it."""
MUCH = 0.1
"""Part of padding above which rows are packed. Rectangles need fewer and larger calls of the attention."""
LossOf = Callable[[MicroBatch, Prediction], torch.Tensor]


class Forward(nn.Module):  # type: ignore[misc]
    """A model's predictions for a micro-batch, as one module: what FSDP gathers for it is let go after it."""

    def __init__(self, model: Any, compute: Compute, critic: ValueHeadModel | None) -> None:
        super().__init__()
        self.model = model
        self.compute = compute
        self.critic = critic
        self.own_outputs = False
        """Whether outputs are to be no views: FSDP marks them."""

    def forward(
        self, micro: MicroBatch, temperature: float, spread: Spread, with_critic: bool, limit: int
    ) -> Prediction:
        hidden = response_hidden(self.model, self.compute, micro)
        return self.of_hidden(hidden, micro, temperature, spread, with_critic, limit)

    def of_hidden(
        self,
        hidden: torch.Tensor,
        micro: MicroBatch,
        temperature: float,
        spread: Spread,
        with_critic: bool,
        limit: int,
    ) -> Prediction:
        """From the last hidden states at the positions that predict the response tokens: [tokens, hidden]."""
        if isinstance(self.model, ValueHeadModel):
            values = self._own(self.model.value(hidden))
            return values, values.new_zeros(0), values
        logp, entropies = hidden_log_probs(self.model, self.compute, hidden, micro, temperature, spread, limit=limit)
        estimates = self._own(self.critic.value(hidden)) if with_critic and self.critic is not None else None
        return self._own(logp), entropies, estimates

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self.own_outputs else tensor


class Executor:
    """One process, or ranks that all go through every micro-batch of their replica."""

    def __init__(
        self,
        forward: Forward,
        together: dist.ProcessGroup | None = None,
        multiple: int = 1,
        packs: bool = False,
        shares: bool = False,
    ) -> None:
        """`together`: ranks that talk in every forward, and so need equally many of them. `multiple`: of which the
        width of a micro-batch must be one. `packs`: where rectangles would have much padding, rows are
        packed one after another instead. `shares`: prompts may be read once for all of their samples."""
        self._forward = forward
        self._shares = shares
        self._packs = packs
        self._multiple = multiple
        self._together = together

    def cut(self, sequences: Sequences, rows: np.ndarray, budget: int, unit: int) -> list[MicroBatch]:
        """`rows` as micro-batches of at most `budget` padded tokens, every `unit` consecutive rows together."""
        found = sequences.micro_batches(rows, budget, unit, self._multiple)
        if self._shares and unit == 1:
            shared = shared_micro_batches(sequences, rows, budget)
            if worth_sharing(found, shared, int(self._forward.model.config.hidden_size)):
                allow_packed(self._forward.model.get_decoder())
                return shared
        if self._packs and mostly_padding(sequences, rows, found):
            return sequences.packed_micro_batches(rows, budget, unit, parts=1, multiple=self._multiple)
        return found

    def predict(
        self, micros: Sequence[MicroBatch], temperature: float, limit: int
    ) -> list[tuple[MicroBatch, torch.Tensor]]:
        """Log-probabilities or values of every micro-batch, float32 on the CPU."""
        found = []
        for micro in self._equalised(micros):
            with torch.no_grad():
                found.append((micro, self._forward(micro, temperature, "none", False, limit)[0].cpu()))
        return found

    def accumulate(
        self,
        micros: Sequence[MicroBatch],
        temperature: float,
        spread: Spread,
        with_critic: bool,
        limit: int,
        loss_of: LossOf,
        after: Callable[[], None],
    ) -> None:
        """Gradients of the losses' sum. `loss_of` is called once per micro-batch that has rows, `after` after each."""
        for micro in self._equalised(micros):
            prediction = self._forward(micro, temperature, spread, with_critic, limit)
            loss = loss_of(micro, prediction) if len(micro.rows) else no_loss(prediction)
            loss.backward()
            after()

    def shared(self, sums: torch.Tensor) -> torch.Tensor:
        """What the losses gave, on every rank of the replica."""
        return sums

    def _equalised(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        """With empty ones at the end, up to the largest number among the ranks that compute together."""
        if self._together is None:
            return list(micros)
        most = torch.tensor([len(micros)])
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._together)
        return [*micros, *(empty_micro_batch(1, self._multiple) for _ in range(int(most) - len(micros)))]


def mostly_padding(sequences: Sequences, rows: np.ndarray, micros: Sequence[MicroBatch]) -> bool:
    """Whether more than `MUCH` of the tokens that rectangles of these rows have is padding."""
    area = sum(micro.ids.numel() for micro in micros)
    return bool(area) and 1.0 - float((sequences.lengths[rows] - 1).sum()) / area > MUCH


def empty_micro_batch(rows: int = 1, width: int = 1) -> MicroBatch:
    """A rectangle of padding, of which nothing is read."""
    none = np.zeros(0, dtype=np.int64)
    index = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(none, torch.zeros(rows, width, dtype=torch.int64), index, index, none, index)


def no_loss(prediction: Prediction) -> torch.Tensor:
    """0, whose gradients are 0 for every weight."""
    predicted, entropies, estimates = prediction
    total = predicted.sum() + entropies.sum()
    return total if estimates is None else total + estimates.sum()
