"""What a generation engine is told, and what it tells. Times are seconds, lengths tokens."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Segments = tuple[tuple[int, int], ...]
"""(version of the weights, tokens generated with it), in order; neighbours have different versions."""

EventKind = Literal["finished", "preempted", "aborted", "interrupted", "paused", "published"]


class EngineError(Exception):
    """An engine that cannot be, or a message that it cannot follow."""


class EngineEvent(NamedTuple):
    """Something that happened at the end of a step. A named tuple: an engine makes one for every request."""

    time: float
    kind: EventKind
    id: Hashable = None
    """Of the request; None where it is about the engine."""
    segments: Segments = ()
    """What the request has generated so far; all of it when finished."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate. `segments` is what it brings along from an earlier, interrupted generation."""

    id: Hashable
    prompt: int
    length: int
    """Tokens of the whole response, those brought along included."""
    group: Hashable = None
    """Requests of a group with equal prompt lengths have the same prompt. None: a prompt of its own."""
    segments: Segments = ()

    def __post_init__(self) -> None:
        if self.prompt < 0 or any(tokens < 0 for _, tokens in self.segments):
            raise EngineError(f"request {self.id!r} has a negative number of tokens")
        if self.length <= self.generated:
            raise EngineError(f"request {self.id!r} has nothing left to generate")

    @property
    def generated(self) -> int:
        """Tokens brought along."""
        return sum(tokens for _, tokens in self.segments) if self.segments else 0


@dataclass(frozen=True, slots=True)
class Submit:
    """Requests queue behind those that wait already."""

    requests: tuple[Request, ...]
    rank: int | None = None
    """Of a lock-step engine. None: one by one, each to the rank with the fewest requests."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Requests leave, running or waiting. Those that are not there have finished: nothing happens."""

    ids: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Partial rollout: requests leave with what they have generated, to go on later, here or elsewhere."""

    ids: tuple[Hashable, ...] | None = None
    """None: all, running and waiting."""


@dataclass(frozen=True, slots=True)
class Publish:
    """New weights: the engine pauses for `seconds`, then running requests go on with `version`."""

    version: int
    seconds: float = 0.0
    keep_kv: bool = True
    """Keys and values of the old weights stay in use; otherwise all that runs is prefilled again, in its slots."""

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise EngineError(f"a pause of {self.seconds} s is impossible")


@dataclass(frozen=True, slots=True)
class Pause:
    """No step starts any more until `Resume`; slots and cache stay as they are."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Undoes `Pause`."""


@dataclass(frozen=True, slots=True)
class SetSpeed:
    """Steps take 1/speed of what the settings say, prefill included."""

    speed: float

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise EngineError(f"a speed of {self.speed} is impossible")


Command = Submit | Abort | Interrupt | Publish | Pause | Resume | SetSpeed
