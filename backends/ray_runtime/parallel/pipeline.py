"""Micro-batches through pipeline stages, by the schedules of torch.distributed.pipelining: 1F1B (Narayanan et al. 2019,
PipeDream), interleaved where a rank has several virtual stages (arXiv 2104.04473).

All micro-batches of a call have the same shape. Rows of padding, and whole micro-batches of padding up to the number
that a schedule needs, are read by nobody: they add 0 to every gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from rlflow.backends.ray_runtime.forward import Spread, autocast
from rlflow.backends.ray_runtime.packing import MicroBatch, Sequences
from rlflow.backends.ray_runtime.parallel.executor import (
    Executor,
    Forward,
    LossOf,
    Prediction,
    empty_micro_batch,
    mostly_padding,
    no_loss,
)
from rlflow.backends.ray_runtime.parallel.mesh import Mesh
from rlflow.backends.ray_runtime.parallel.packed import packed_inputs

_WINDOW = 4
"""Micro-batches of a prediction per stage at once: torch keeps what goes between stages until the end of a pass."""
OnLast = Callable[[MicroBatch, torch.Tensor], torch.Tensor]
"""From a micro-batch and its last hidden states [rows, width, hidden] to a tensor of one element."""


class _Stage(nn.Module):  # type: ignore[misc]
    """The layers of one virtual stage; the last one goes on to what is made of the hidden states."""

    def __init__(self, decoder: Any, forward: Forward, first: bool, last: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self._first, self._last = first, last
        self._model, self._compute = [forward.model], forward.compute
        self.micros: Sequence[MicroBatch] = ()
        self.on_last: OnLast | None = None

    def forward(self, values: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """`values`: token ids, or the hidden states before; `number` int64 [1]: of the micro-batch."""
        micro = self.micros[int(number)]
        with autocast(self._model[0], self._compute):
            inputs = {"input_ids" if self._first else "inputs_embeds": values, **packed_inputs(micro, values.device)}
            hidden: torch.Tensor = self.decoder(**inputs, use_cache=False).last_hidden_state
        if not self._last:
            return hidden
        assert self.on_last is not None
        return self.on_last(micro, hidden)


class PipelineExecutor(Executor):
    """Ranks of one replica that have different layers."""

    def __init__(
        self,
        forward: Forward,
        mesh: Mesh,
        decoders: list[tuple[int, Any]],
        together: dist.ProcessGroup | None,
        multiple: int,
        packs: bool,
    ) -> None:
        super().__init__(forward, together, multiple, packs)
        self._mesh = mesh
        self._count = mesh.layout.pp * mesh.layout.vp
        self._hidden = int(forward.model.config.hidden_size)
        self._device = forward.model.device
        self._stages = [
            (number, _Stage(decoder, forward, number == 0, number == self._count - 1)) for number, decoder in decoders
        ]

    def cut(self, sequences: Sequences, rows: np.ndarray, budget: int, unit: int) -> list[MicroBatch]:
        options = {"parts": self._mesh.layout.pp, "multiple": self._multiple}
        even = sequences.even_micro_batches(rows, budget, unit, **options)
        if self._packs and mostly_padding(sequences, rows, even):
            return sequences.packed_micro_batches(rows, budget, unit, **options)
        return even

    def predict(
        self, micros: Sequence[MicroBatch], temperature: float, limit: int
    ) -> list[tuple[MicroBatch, torch.Tensor]]:
        group = self._mesh.pp
        assert group is not None
        parts: dict[int, torch.Tensor] = {}

        def keep(micro: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
            if len(micro.rows):
                parts[id(micro)] = self._predicted(micro, hidden, temperature, "none", False, limit)[0].cpu()
            return hidden.new_zeros(1)

        equalised = self._equalised(micros)
        window = _WINDOW * self._count
        for start in range(0, len(equalised), window):
            self._run(equalised[start : start + window], keep, train=False)
        sizes = [len(micro.targets) for micro in micros]
        found = torch.zeros(sum(sizes))
        if parts:
            found = torch.cat([parts[id(micro)] for micro in micros])
        dist.broadcast(found, dist.get_global_rank(group, group.size() - 1), group=group)
        return list(zip(micros, found.split(sizes), strict=True))

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
        def loss(micro: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
            prediction = self._predicted(micro, hidden, temperature, spread, with_critic, limit)
            return (loss_of(micro, prediction) if len(micro.rows) else no_loss(prediction)).reshape(1)

        self._run(self._equalised(micros), loss, train=True)
        after()

    def shared(self, sums: torch.Tensor) -> torch.Tensor:
        """The last stage has the losses, the others zeros."""
        dist.all_reduce(sums, group=self._mesh.pp)
        return sums

    def _predicted(
        self,
        micro: MicroBatch,
        hidden: torch.Tensor,
        temperature: float,
        spread: Spread,
        with_critic: bool,
        limit: int,
    ) -> Prediction:
        read = hidden.flatten(0, 1)[micro.read.to(hidden.device)]
        return self._forward.of_hidden(read, micro, temperature, spread, with_critic, limit)

    def _run(self, micros: Sequence[MicroBatch], on_last: OnLast, *, train: bool) -> None:
        """One pass of a schedule over all micro-batches."""
        micros = self._filled(micros)
        rows = max((len(micro.ids) for micro in micros), default=1)
        width = max((micro.ids.shape[1] for micro in micros), default=self._multiple)
        numbers = torch.arange(len(micros))
        stages = []
        for number, module in self._stages:
            module.micros, module.on_last = micros, on_last
            stages.append(self._torch_stage(module, number, rows, width, train))
        schedule = self._schedule(stages, len(micros), train)
        inputs = []
        if self._mesh.first_stage:
            inputs.append(torch.cat([_padded(micro.ids, rows, width) for micro in micros]).to(self._device))
        if train:
            schedule.step(*inputs, number=numbers, **({"target": numbers} if self._mesh.last_stage else {}))
        else:
            with torch.no_grad():
                schedule.eval(*inputs, number=numbers)
        for _, module in self._stages:
            module.micros, module.on_last = (), None

    def _torch_stage(self, module: _Stage, number: int, rows: int, width: int, train: bool) -> PipelineStage:
        """Shapes are told, so that torch does not run the model once to find them."""
        hidden = torch.empty(rows, width, self._hidden, device="meta", requires_grad=train)
        return PipelineStage(
            module,
            number,
            self._count,
            self._device,
            input_args=torch.empty(rows, width, dtype=torch.int64, device="meta") if number == 0 else hidden,
            output_args=torch.empty(1, device="meta", requires_grad=train) if number == self._count - 1 else hidden,
            group=self._mesh.pp,
        )

    def _schedule(self, stages: list[PipelineStage], count: int, train: bool) -> Any:
        options = {"loss_fn": _own_loss if train else None, "scale_grads": False}
        if len(stages) > 1:
            return ScheduleInterleaved1F1B(stages, count, **options)
        return Schedule1F1B(stages[0], count, **options)

    def _filled(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        """With empty ones up to the number of stages, or with virtual stages up to a whole number of rounds."""
        pp = self._mesh.layout.pp
        count = max(-(-len(micros) // pp), 1) * pp if self._count > pp else max(len(micros), pp)
        return [*micros, *(empty_micro_batch() for _ in range(count - len(micros)))]


def _own_loss(loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The last stage gives the loss itself."""
    return loss.sum()


def _padded(ids: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    whole = ids.new_zeros(rows, width)
    whole[: ids.shape[0], : ids.shape[1]] = ids
    return whole
