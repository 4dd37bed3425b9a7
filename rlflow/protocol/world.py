"""What the token game is played with: durations, failures, slots, data, and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rlflow.protocol.generator import Time
from rlflow.protocol.tally import Tally


@dataclass(frozen=True, slots=True)
class Change:
    """Made when `version` is published."""

    version: int
    bound: int | None = None
    batch: int | None = None
    from_step: int | None = None
    """Of the batch; None: the first step that no sample can be due at."""


@dataclass(frozen=True, slots=True)
class World:
    """Everything that the protocol does not decide. Times are in one unit; ints and Fractions keep the game exact."""

    length: Callable[[int], int]
    """Tokens of a sample by its id, at least 0."""
    train: Callable[[int], Time] = lambda step: 1
    """Time of a step with a whole batch."""
    sync: Callable[[int], Time] = lambda step: 0
    """Time from the end of the step until its version is published."""
    step_time: Callable[[int], Time] = lambda running: 1
    """Time of one token where so many samples run."""
    slots: int | None = None
    """Samples that run at once; None: any number."""
    slot_changes: tuple[tuple[Time, int], ...] = ()
    """(time, slots from then on). The last started lose their slot first, and keep their tokens."""
    groups: int | None = None
    """Prompts in the data; None: endless."""
    fails: Callable[[int, int], int | None] = lambda sample, attempt: None
    """Tokens after which this attempt (from 0) of this sample fails; None: it does not."""
    on_failure: Literal["retry", "replace", "lose", "reject"] = "retry"
    """Again from the prompt; a new sample in its place; its group goes on short; its group is rejected."""
    filtered: Callable[[int], bool] = lambda group: False
    """Whether a finished group is rejected."""
    changes: tuple[Change, ...] = ()
    waits_for_sync: bool = True
    """Whether the next step starts only when the last version is published."""
    colocated: bool = False
    """Training takes the devices: from the start of a step to its publication nothing runs."""
    switch: bool = False
    """Running samples go on with each new version (in-flight update); else with the weights they started with."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One sample in one step."""

    step: int
    id: int
    group: int
    birth: int
    age: int
    tokens: int


@dataclass(slots=True)
class Report:
    """What happened. Times in the world's unit."""

    samples: list[Trained] = field(default_factory=list)
    """In the order of training."""
    started: list[Time] = field(default_factory=list)
    """Start of every step."""
    trained: list[Time] = field(default_factory=list)
    """End of every step."""
    published: list[Time] = field(default_factory=list)
    """Publication of versions first + 1, first + 2, ..."""
    deadlock: str | None = None
    """What the game was waiting for when nothing could happen any more."""
    now: Time = 0
    tally: Tally = field(default_factory=Tally)

    @property
    def worst_age(self) -> int:
        return max((sample.age for sample in self.samples), default=0)

    @property
    def mean_age(self) -> float:
        return sum(sample.age for sample in self.samples) / len(self.samples) if self.samples else 0.0

    @property
    def wasted_tokens(self) -> int:
        return self.tally.wasted_tokens

    def ids(self, step: int) -> list[int]:
        """Samples of a step, sorted."""
        return sorted(sample.id for sample in self.samples if sample.step == step)
