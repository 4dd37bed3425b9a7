"""Count, mean and variance of values that may lie on several ranks, and whitening with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Moments:
    """`squares` is the sum of squared distances from the mean. Parts combine without cancellation (`merge`)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def variance(self) -> float:
        """Sample variance (divided by count - 1); 0 for fewer than two values."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets of values together; Chan, Golub & LeVeque 1979, pairwise update."""
        count = self.count + other.count
        if not count:
            return Moments()
        distance = other.mean - self.mean
        mean = self.mean + distance * other.count / count
        squares = self.squares + other.squares + distance * distance * self.count * other.count / count
        return Moments(count, mean, squares)


def moments(values: torch.Tensor, mask: torch.Tensor | None = None) -> Moments:
    """Moments in float64 of the counted values; `values` of any shape, `mask` of the same shape."""
    chosen = values.detach().double() if mask is None else values.detach().double()[mask > 0]
    if not chosen.numel():
        return Moments()
    mean = float(chosen.mean())
    return Moments(float(chosen.numel()), mean, float((chosen - mean).square().sum()))


def whiten(
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    over: Moments | None = None,
    epsilon: float = 1e-8,
    keep_mean: bool = False,
) -> torch.Tensor:
    """(value - mean) / sqrt(variance + epsilon) for counted values, 0 for the others.

    Sample variance, epsilon inside the root: verl's and trl's `masked_whiten`. Fewer than two counted values, or
    values that are all equal, give 0 (the mean with `keep_mean`).

    Args:
        values: [tokens]. mask: [tokens], 0 = not counted. No gradient flows.
        over: moments of the whole batch when `values` are one rank's part (each rank's `moments`, merged in a fixed
            order). Default: those of the values at hand.
    """
    found = moments(values, mask) if over is None else over
    centred = values.detach().double() - found.mean
    if found.squares <= (1e-12 * found.mean) ** 2 * found.count:
        centred = torch.zeros_like(centred)  # all equal up to the rounding of the mean
    white = centred / (found.variance + epsilon) ** 0.5 + (found.mean if keep_mean else 0.0)
    return (white if mask is None else torch.where(mask > 0, white, torch.zeros_like(white))).to(values.dtype)
