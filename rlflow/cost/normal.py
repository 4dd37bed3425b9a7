"""The standard normal distribution, without importing more than `math` until a quantile is asked for."""

from __future__ import annotations

from math import erfc, exp, pi, sqrt

_ROOT_HALF = sqrt(0.5)


def cdf(z: float) -> float:
    return 0.5 * erfc(-z * _ROOT_HALF)


def density(z: float) -> float:
    return exp(-0.5 * z * z) / sqrt(2 * pi)


def quantile(q: float) -> float:
    """For q in (0, 1)."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(q)
