"""Seconds and bytes of one stage of a flow, from the model, its layout, the machine and the work."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from rlflow.cost.components import MIXED, Components, Precision
from rlflow.cost.decode import Speculation
from rlflow.cost.errors import WorkloadError
from rlflow.cost.flops import Head
from rlflow.cost.lengths import Lengths
from rlflow.cost.microbatch import mean_sequence, mean_square
from rlflow.cost.pipelines import PipelineSchedule
from rlflow.values import dataclass

Role = Literal["train", "logprobs", "values", "score", "generate"]


@dataclass(frozen=True, slots=True)
class Workload:
    """One batch: `prompts` prompts with `samples` responses each. Lengths in tokens."""

    prompts: int
    prompt: Lengths
    response: Lengths
    samples: int = 1
    microbatch_tokens: int = 16384
    """A micro-batch of one data-parallel replica holds at most so many, or one longer sequence."""
    minibatch: int = 0
    """Samples of one update; 0 = the whole batch."""
    epochs: int = 1
    """How often training goes over the batch."""

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.samples < 1 or self.microbatch_tokens < 1 or self.minibatch < 0 or self.epochs < 1:
            raise WorkloadError("a batch has at least one prompt, sample, epoch and token of a micro-batch")

    @property
    def rows(self) -> int:
        """Samples."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """Prompts and responses of all samples."""
        return self.rows * mean_sequence(self.prompt, self.response)

    @property
    def squares(self) -> float:
        """Sum of the squares of the lengths of all samples."""
        return self.rows * mean_square(self.prompt, self.response)

    @property
    def longest(self) -> int:
        return int(self.prompt.maximum + self.response.maximum)

    def capped(self, max_new: int) -> Workload:
        """The same with responses cut off at `max_new` tokens."""
        return replace(self, response=self.response.capped(max_new))


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """How passes over whole sequences run: training, log-probabilities, values, scores."""

    precision: Precision = MIXED
    head: Head = "vocabulary"
    """Value and reward models have a scalar one."""
    flash: bool = True
    """Attention that does not keep its scores."""
    schedule: PipelineSchedule | None = None
    """None = 1F1B, or interleaved where the layout has virtual stages."""
    skew: float = 1.0
    """Tokens of the busiest expert rank over the mean."""
    overlap: float = 0.7
    """Share of the gradients' reduction that can run behind the last backward pass (0.7 to 1)."""

    def __post_init__(self) -> None:
        if self.skew < 1 or not 0 <= self.overlap <= 1:
            raise WorkloadError("skew is at least 1, and overlap in [0, 1]")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a generation engine runs."""

    precision: Precision = MIXED
    slots: int = 256
    """Requests that may run at once in one engine."""
    memory_share: float = 0.9
    """Of a device's memory that the engine may take."""
    buckets: tuple[int, ...] = ()
    """Batch sizes with a captured graph."""
    prefill_tokens: int = 8192
    """Prompt tokens of one prefill pass."""
    shared_prefix: bool = True
    """The samples of a prompt share its prefill."""
    spread: bool = True
    """The samples of a prompt may go to different engines."""
    skew: float = 1.0
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if self.slots < 1 or self.prefill_tokens < 1 or self.skew < 1:
            raise WorkloadError("an engine has at least one slot and prefill token, and a skew of at least 1")


@dataclass(frozen=True, slots=True)
class StageCost:
    """`seconds` is the sum of `parts`; `peak_bytes` the total of `static`, on the fullest device."""

    seconds: float
    parts: tuple[tuple[str, float], ...]
    static: Components
    peak_bytes: int

    @classmethod
    def of(cls, parts: tuple[tuple[str, float], ...], static: Components) -> StageCost:
        return cls(sum(seconds for _, seconds in parts), parts, static, static.total)

    def part(self, name: str) -> float:
        """Seconds of a part; 0 where the stage has no such part."""
        return dict(self.parts).get(name, 0.0)


def functions(rows: int, seconds_per_row: float, workers: int, call_s: float = 0.0) -> StageCost:
    """A Python function over rows, on CPU workers that each take a row at a time."""
    if workers < 1 or seconds_per_row < 0 or call_s < 0:
        raise WorkloadError("functions need a worker and seconds of at least 0")
    turns = -(-rows // workers)
    return StageCost.of((("compute", turns * seconds_per_row), ("dispatch", rows * call_s)), Components())
