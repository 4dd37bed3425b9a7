"""What a rule sees: the outstanding groups of samples, and what it decides."""

from __future__ import annotations

from rlflow.values import dataclass


@dataclass(slots=True)
class Unit:
    """A group of samples, admitted and consumed whole; a lone sample is a group of one."""

    id: int
    """Rises in the order of admission."""
    version: int
    """Published version at admission."""
    deadline: int
    """The last step that may train on it."""
    birth: int | None = None
    """Oldest version of any token; None before the first."""
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a step may start, and with what."""

    take: tuple[int, ...] = ()
    """The groups to train on, in the order of training; empty: not yet."""
    drop: tuple[int, ...] = ()
    """Groups to give up now, whether the step starts or not."""
    waits_for: str = ""
    """What is missing where `take` is empty."""

    @property
    def ready(self) -> bool:
        return bool(self.take)
