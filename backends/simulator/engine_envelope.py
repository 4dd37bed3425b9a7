"""Seconds of steps of ranks in lock step: every step takes as long as the slowest rank.

A rank's step time is a line over the number of the step, so the slowest is the upper envelope of the lines: at most as
many pieces as ranks, each summed in closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, sqrt
from typing import NamedTuple

Line = tuple[float, float]
"""(base, slope): step j takes base + slope j, slope at least 0."""


class Piece(NamedTuple):
    """Steps from `first` on, up to the next piece."""

    first: int
    before: float
    """Seconds of all steps before it."""
    base: float
    """Of step `first`."""
    slope: float

    def until(self, step: int) -> float:
        """Seconds of the steps before `step`, which lies in this piece or ends it."""
        n = step - self.first
        return self.before + n * self.base + self.slope * (n * (n - 1) / 2)


def envelope(lines: Sequence[Line], steps: int) -> tuple[list[Piece], float]:
    """Pieces of the steps 0 to steps - 1, and their seconds."""
    pieces: list[Piece] = []
    first, before = 0, 0.0
    base, slope = max(lines)
    while True:
        piece = Piece(first, before, base + slope * first, slope)
        pieces.append(piece)
        # Only steeper lines overtake; the search goes on with one of them, so rounding cannot make it go in circles.
        steeper = [(_overtakes(line, (base, slope), first), line) for line in lines if line[1] > slope]
        following = min((step for step, _ in steeper), default=steps)
        if following >= steps:
            return pieces, piece.until(steps)
        before = piece.until(following)
        first = following
        base, slope = max((b + s * first, s, b) for step, (b, s) in steeper if step == first)[:0:-1]


def _overtakes(line: Line, other: Line, first: int) -> int:
    """The first step after `first` at which a line is above another, less steep one that it does not exceed there."""
    return max(first, floor((other[0] - line[0]) / (line[1] - other[1]))) + 1


def steps_within(pieces: Sequence[Piece], seconds: float) -> int:
    """The smallest number of steps that takes at least so long; the last piece goes on for ever.

    Solves seconds = n base + slope n (n - 1)/2 in the form without cancellation. Steps take time.
    """
    if seconds <= 0:
        return 0
    index = len(pieces) - 1
    while index and pieces[index].before >= seconds:
        index -= 1
    piece = pieces[index]
    wanted, half = seconds - piece.before, piece.slope / 2
    linear = piece.base - half
    root = sqrt(max(0.0, linear * linear + 4 * half * wanted))
    n = floor(2 * wanted / (linear + root) if linear > 0 else (root - linear) / piece.slope)
    while n > 0 and piece.until(piece.first + n - 1) >= seconds:
        n -= 1
    while piece.until(piece.first + n) < seconds:
        n += 1
    return piece.first + n
