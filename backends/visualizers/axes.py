"""Ranges and marks of the axes of a plot."""

from __future__ import annotations

import math

Point = tuple[float, float]


def ticks(bounds: Point, about: int, whole: bool = False) -> list[tuple[float, str]]:
    """Round values inside the bounds, at most about `about`, with the words to write."""
    low, high = bounds
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    if whole:
        step = max(step, 1.0)
    first = math.ceil(low / step - 1e-9)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    values = [(first + i) * step for i in range(int((high - first * step) / step + 1e-9) + 1)]
    if step >= 1e5 or digits > 5:
        return [(value, f"{value:.3g}") for value in values]
    return [(value, f"{value + 0.0:.{digits}f}") for value in values]  # + 0.0 turns -0.0 into 0.0


def widen(bounds: Point, flat: float | None = None) -> Point:
    """Bounds with a margin of 5 %, or around a single value; `flat` = margin for a single value, none otherwise."""
    low, high = bounds
    if high > low:
        margin = 0.0 if flat is not None else (high - low) * 0.05
    else:
        margin = flat if flat is not None else max(abs(low) * 0.1, 0.05)
    return low - margin, high + margin
