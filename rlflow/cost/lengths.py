"""Distributions of lengths in tokens: of responses, and of prompts.

All are bounded by `maximum`, where a generation is cut off; what would be longer is a point mass there. Samples of one
prompt are correlated: a length is what its prompt asks for times what the sample makes of it. Nothing is random here:
moments are closed forms, and the largest of many an integral.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import exp, log, sqrt
from typing import Protocol

from rlflow.cost import normal
from rlflow.cost.errors import WorkloadError
from rlflow.values import dataclass


class Lengths(Hashable, Protocol):
    """A distribution over [0, maximum]. Implementations are frozen and hashable."""

    @property
    def maximum(self) -> float: ...

    def cdf(self, x: float) -> float:
        """P(length <= x)."""
        ...

    def group_cdf(self, x: float, n: int) -> float:
        """P(all n samples of one prompt <= x)."""
        ...

    def quantile(self, q: float) -> float:
        """The smallest x with cdf(x) >= q, for q in [0, 1]."""
        ...

    def limited(self, x: float, power: int) -> float:
        """E[min(length, x)^power] for power 1 or 2."""
        ...

    def capped(self, maximum: float) -> Lengths:
        """The same, cut off at `maximum` if that is lower."""
        ...


def mean(lengths: Lengths) -> float:
    return lengths.limited(lengths.maximum, 1)


def second_moment(lengths: Lengths) -> float:
    return lengths.limited(lengths.maximum, 2)


@lru_cache(maxsize=4096)
def largest(lengths: Lengths, prompts: int, n: int = 1) -> float:
    """E[max] over `prompts` prompts with n samples each: the integral of 1 - G(x)^prompts, G of one prompt.

    By the trapezoidal rule over quantiles of the normal scale, so that the tail is resolved; it ends at 8 deviations,
    beyond which no double tells a probability from 1.
    """
    if prompts < 1 or n < 1:
        raise WorkloadError(f"the largest of {prompts} x {n} lengths is not defined")
    points = sorted({0.0, *(lengths.quantile(normal.cdf(i / 16)) for i in range(-96, 129))})
    total, before = 0.0, 1.0
    for low, high in pairwise(points):
        # From the left at the upper end: a point mass at `high` belongs to lengths that reach it.
        after = 1.0 - lengths.group_cdf(high * (1 - 1e-12), n) ** prompts
        total += (high - low) * (before + after) / 2
        before = 1.0 - lengths.group_cdf(high, n) ** prompts
    return total


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length."""

    tokens: float

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise WorkloadError(f"a length of {self.tokens} tokens is impossible")

    @property
    def maximum(self) -> float:
        return self.tokens

    def cdf(self, x: float) -> float:
        return float(x >= self.tokens)

    def group_cdf(self, x: float, n: int) -> float:
        return self.cdf(x)

    def quantile(self, q: float) -> float:
        return self.tokens if q > 0 else 0.0

    def limited(self, x: float, power: int) -> float:
        return float(min(x, self.tokens) ** power)

    def capped(self, maximum: float) -> Fixed:
        return Fixed(min(self.tokens, maximum))


@dataclass(frozen=True, slots=True)
class Lognormal:
    """ln length = mu + u + e with u normal by prompt, e normal by sample; cut off at `limit` with a point mass."""

    mu: float
    sigma_prompt: float
    sigma_sample: float
    limit: float

    def __post_init__(self) -> None:
        if self.limit <= 0 or self.sigma_prompt < 0 or self.sigma_sample < 0:
            raise WorkloadError("a lognormal needs a positive limit and deviations of at least 0")

    @classmethod
    def of_mean(cls, tokens: float, limit: float, sigma: float = 0.75, prompt_share: float = 0.5) -> Lognormal:
        """With this mean after the cut. `sigma` of the logarithm before it, whose variance is `prompt_share` prompt.

        WorkloadError unless 0 < mean < limit.
        """
        if not 0 < tokens < limit:
            raise WorkloadError(f"a mean of {tokens} tokens is not between 0 and the limit of {limit}")
        between, within = sigma * sqrt(prompt_share), sigma * sqrt(1 - prompt_share)
        low, high = log(tokens) - sigma * sigma / 2 - 1, log(limit) + 40 * (1 + sigma)
        for _ in range(100):
            middle = (low + high) / 2
            if mean(cls(middle, between, within, limit)) < tokens:
                low = middle
            else:
                high = middle
        return cls((low + high) / 2, between, within, limit)

    @property
    def sigma(self) -> float:
        return sqrt(self.sigma_prompt**2 + self.sigma_sample**2)

    @property
    def maximum(self) -> float:
        return self.limit

    @property
    def clipped(self) -> float:
        """The share that is cut off."""
        return 1.0 - _phi(log(self.limit) - self.mu, self.sigma)

    def cdf(self, x: float) -> float:
        if x >= self.limit:
            return 1.0
        return _phi(log(x) - self.mu, self.sigma) if x > 0 else 0.0

    def group_cdf(self, x: float, n: int) -> float:
        if x >= self.limit:
            return 1.0
        if x <= 0:
            return 0.0
        d = log(x) - self.mu
        if n == 1 or self.sigma_sample == 0:
            return _phi(d, self.sigma)
        if self.sigma_prompt == 0:
            return _phi(d, self.sigma_sample) ** n
        # Trapezoids of step 1/4 over +-6 deviations of the prompt's part: spectrally accurate for a normal weight.
        return sum(weight * _phi(d - self.sigma_prompt * z, self.sigma_sample) ** n for z, weight in _NODES)

    def quantile(self, q: float) -> float:
        if q <= 0:
            return 0.0
        if q >= 1:
            return self.limit
        return min(self.limit, exp(self.mu + self.sigma * normal.quantile(q)))

    def limited(self, x: float, power: int) -> float:
        x = min(x, self.limit)
        if x <= 0:
            return 0.0
        s, d = self.sigma, log(x) - self.mu
        below = exp(power * self.mu + (power * s) ** 2 / 2) * _phi(d - power * s * s, s)
        return float(below + x**power * _phi(-d, s))

    def capped(self, maximum: float) -> Lognormal:
        return replace(self, limit=min(self.limit, maximum))

    def scaled(self, factor: float) -> Lognormal:
        """All lengths times `factor` before the cut: how lengths drift while a model learns."""
        return replace(self, mu=self.mu + log(factor))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several kinds of prompts, such as those answered at once and those thought about. A prompt's samples are of its
    kind."""

    parts: tuple[tuple[float, Lengths], ...]
    """Share of the prompts, and their lengths. Shares add up to 1."""

    def __post_init__(self) -> None:
        if not self.parts or min(w for w, _ in self.parts) < 0 or abs(sum(w for w, _ in self.parts) - 1) > 1e-9:
            raise WorkloadError("the shares of a mixture are at least 0 and add up to 1")

    @property
    def maximum(self) -> float:
        return max(part.maximum for weight, part in self.parts if weight > 0)

    def cdf(self, x: float) -> float:
        return sum(weight * part.cdf(x) for weight, part in self.parts)

    def group_cdf(self, x: float, n: int) -> float:
        return sum(weight * part.group_cdf(x, n) for weight, part in self.parts)

    def quantile(self, q: float) -> float:
        low, high = 0.0, self.maximum
        if q <= 0:
            return 0.0
        if self.cdf(high) < q:
            return high  # the shares add up to a rounding error less than 1
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if self.cdf(middle) >= q else (middle, high)
        return high

    def limited(self, x: float, power: int) -> float:
        return sum(weight * part.limited(x, power) for weight, part in self.parts)

    def capped(self, maximum: float) -> Mixture:
        return Mixture(tuple((weight, part.capped(maximum)) for weight, part in self.parts))


@dataclass(frozen=True, slots=True)
class Trace:
    """Measured lengths. With `group` > 1 every so many in a row are samples of one prompt."""

    tokens: tuple[float, ...]
    group: int = 1

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 0 or self.group < 1 or len(self.tokens) % self.group:
            raise WorkloadError("a trace has lengths of at least 0, in whole groups")

    @property
    def maximum(self) -> float:
        return max(self.tokens)

    def cdf(self, x: float) -> float:
        return bisect_right(_ordered(self.tokens), x) / len(self.tokens)

    def group_cdf(self, x: float, n: int) -> float:
        """Samples of a prompt are drawn from those measured for it, or for all prompts where groups are not known."""
        if self.group == 1:
            return self.cdf(x) ** n
        groups = [self.tokens[i : i + self.group] for i in range(0, len(self.tokens), self.group)]
        return sum((sum(t <= x for t in group) / self.group) ** n for group in groups) / len(groups)

    def quantile(self, q: float) -> float:
        if q <= 0:
            return 0.0
        ordered = _ordered(self.tokens)
        rank = q * len(ordered)
        index = int(rank) - (rank == int(rank))
        return ordered[min(len(ordered) - 1, max(0, index))]

    def limited(self, x: float, power: int) -> float:
        return float(sum(min(t, x) ** power for t in self.tokens) / len(self.tokens))

    def capped(self, maximum: float) -> Trace:
        return Trace(tuple(min(t, maximum) for t in self.tokens), self.group)


def stratified(lengths: Lengths, count: int) -> list[float]:
    """`count` lengths that stand for the distribution, shortest first: the middles of strata, scaled to its mean."""
    values = [lengths.quantile((i + 0.5) / count) for i in range(count)]
    total, wanted = sum(values), count * mean(lengths)
    return [value * wanted / total for value in values] if total else values


def spread(values: Sequence[float]) -> list[float]:
    """The same values in an order without a trend, which stands for a random one: steps of the golden ratio."""
    step = (sqrt(5) - 1) / 2
    return [value for _, value in sorted((i * step % 1.0, value) for i, value in enumerate(values))]


@lru_cache(maxsize=64)
def _ordered(tokens: tuple[float, ...]) -> list[float]:
    return sorted(tokens)


def _phi(d: float, sigma: float) -> float:
    """P(sigma x normal <= d)."""
    return normal.cdf(d / sigma) if sigma > 0 else float(d >= 0)


_NODES = tuple((i / 4, normal.density(i / 4) / 4) for i in range(-24, 25))
