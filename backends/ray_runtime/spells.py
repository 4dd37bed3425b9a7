"""What an engine's time goes to, spell by spell: between two of them samples joined or left the batch."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

MOST = 10_000
"""Spells that are kept where nobody reads them."""


class Spell(NamedTuple):
    """Reading contexts (`steps` 0), or decoding some tokens of a batch. Sums are over the steps."""

    steps: int
    samples: int
    """Decoded, and not yet finished. Where contexts are read: contexts."""
    tokens: int
    """Of the contexts of these samples: what attention reads, or what is computed without padding."""
    seconds: float

    def row(self) -> list[int]:
        """As the trace has it: steps, samples, tokens, whole microseconds."""
        return [self.steps, self.samples, self.tokens, round(self.seconds * 1e6)]


Spells: TypeAlias = deque[Spell]


def no_spells() -> Spells:
    """Keeps the last `MOST`."""
    return deque(maxlen=MOST)


def taken(spells: Spells) -> list[list[int]]:
    """The rows of all that have been noted since the last time. Another thread may note more meanwhile."""
    return [spells.popleft().row() for _ in range(len(spells))]


class Stopwatch:
    """Of one wave: adds its steps up, and notes them as a spell when the batch changes."""

    def __init__(self, spells: Spells, now: float) -> None:
        self._spells = spells
        self._since = now
        self._steps = self._samples = self._tokens = 0

    def step(self, samples: int, tokens: int) -> None:
        """One more step of so many samples, with so many tokens of context together."""
        self._steps += 1
        self._samples += samples
        self._tokens += tokens

    def lap(self, now: float) -> None:
        """The batch changes."""
        if self._steps:
            self._spells.append(Spell(self._steps, self._samples, self._tokens, now - self._since))
        self._since, self._steps, self._samples, self._tokens = now, 0, 0, 0
