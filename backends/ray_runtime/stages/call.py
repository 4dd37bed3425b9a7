"""What a stage's handler gets to see: its inputs by port, the rank's state and where measurements go."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime.algorithms.moments import Moments
from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.measure import StepMetrics
from rlflow.backends.ray_runtime.reward_worker import Handle
from rlflow.backends.ray_runtime.row_stages import ROW_PORTS
from rlflow.backends.ray_runtime.splitting import Split
from rlflow.backends.ray_runtime.state import ModelState, RankState
from rlflow.plan import Stage

Value = Batch | np.ndarray | Packed | Handle | None
"""Rows, a column with one number per row, one with one number per response token, a reward being computed."""


@dataclass
class Frame:
    """Values by the stage that gave them. Every column keeps the rows it belongs to in `rows`."""

    values: dict[str, Value] = field(default_factory=dict)
    rows: dict[str, Batch] = field(default_factory=dict)
    splits: dict[str, list[Split]] = field(default_factory=dict)
    """Of rows that came from another pool: how they were dealt out over this pool's ranks."""
    started: dict[str, float] = field(default_factory=dict)
    """Asynchronous calls in progress: seconds since the epoch."""

    def put(self, stage: Stage, value: Value) -> None:
        if value is None:
            return
        self.values[stage.id] = value
        if isinstance(value, Batch):
            self.rows[stage.id] = value
            return
        producer = next((stage.inputs[port] for port in ROW_PORTS if port in stage.inputs), "")
        if producer in self.rows:
            self.rows[stage.id] = self.rows[producer]

    def drop(self, stage_id: str) -> None:
        self.values.pop(stage_id, None)
        self.rows.pop(stage_id, None)


@dataclass
class Call:
    """One execution of one stage on this rank."""

    stage: Stage
    state: RankState
    step: int
    metrics: StepMetrics
    frame: Frame
    rerun: Callable[[Stage], Frame]
    """Runs what a stage's inputs come from once more, from `take` on, with the next prompts; gives the new values."""
    tokens: int | None = None
    """What the trace says about the size of the work."""

    def has(self, port: str) -> bool:
        return port in self.stage.inputs

    def batch(self, port: str) -> Batch:
        """The rows at a port."""
        value = self.frame.values[self.stage.inputs[port]]
        assert isinstance(value, Batch), f"`{port}` must be rows"
        return value

    def rows_of(self, port: str) -> Batch:
        """The rows that the column at a port belongs to."""
        return self.frame.rows[self.stage.inputs[port]]

    def column(self, port: str) -> np.ndarray | Packed:
        """The column at a port, one number per row or per response token."""
        value = self.frame.values[self.stage.inputs[port]]
        assert isinstance(value, np.ndarray | Packed), f"`{port}` must be a column"
        return value

    def per_row(self, port: str) -> np.ndarray:
        """float [rows]; NaN = not applicable."""
        value = self.column(port)
        assert isinstance(value, np.ndarray), f"`{port}` must have one number per row"
        return value

    def per_token(self, port: str) -> Packed:
        """float32 per response token; NaN = not applicable."""
        value = self.column(port)
        assert isinstance(value, Packed), f"`{port}` must have one number per response token"
        return value

    def model(self, name: str) -> ModelState:
        return self.state.models[name]

    def over_ranks(self, numbers: list[float]) -> np.ndarray:
        """float64 [ranks, numbers]: what every rank gives here, in rank order. All ranks must call."""
        group = self.state.group
        if group is None:
            return np.array([numbers], dtype=np.float64)
        mine = torch.tensor(numbers, dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        return np.asarray(torch.stack(parts).numpy())

    def merged(self, part: Moments) -> Moments:
        """Moments over all ranks, merged in rank order. All ranks must call."""
        out = Moments()
        for count, mean, squares in self.over_ranks([part.count, part.mean, part.squares]):
            out = out.merge(Moments(float(count), float(mean), float(squares)))
        return out

    def started(self) -> None:
        """Note that an asynchronous call begins now."""
        self.frame.started[self.stage.id] = time.time()


Handlers = Mapping[str, Callable[..., Value]]


def token_count(samples: Batch) -> int:
    """Prompt and response tokens."""
    return len(samples.packed("prompt_ids").values) + len(samples.packed("response_ids").values)


def counted_tokens(samples: Batch) -> torch.Tensor | None:
    """The column `mask` [response tokens], 0 = written by an environment; None when every token is the model's."""
    return samples.packed("mask").values if "mask" in samples.columns else None


def spread(numbers: np.ndarray, like: Packed) -> torch.Tensor:
    """Each row's number at each of its response tokens: float32 [tokens]."""
    return torch.repeat_interleave(torch.from_numpy(np.asarray(numbers, dtype=np.float32)), like.lengths)


def rows_with_nan(column: Packed, mask: torch.Tensor | None) -> np.ndarray:
    """bool [rows]: a counted token of the row is NaN."""
    bad = torch.isnan(column.values)
    if mask is not None:
        bad &= mask > 0
    return np.bincount(column.row_ids()[bad].numpy(), minlength=column.rows) > 0
