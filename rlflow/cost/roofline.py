"""Seconds of one operation: the larger of its products and its memory traffic, with efficiencies that saturate.

The shapes follow Calculon's tables for an A100 (Isaev et al., SC'23): matrix units reach 0.95 of what they can from 128
GFLOP on and about 0.1 for the smallest products; memory 0.90 at 100 MB, 0.75 at 10 MB, 0.60 at 1 MB and 0.30 below.
"""

from __future__ import annotations

from itertools import pairwise
from math import log

_A100_FLOP_PER_S = 312e12
_HALF_FLOP = 128e9 * (1 / 0.95 - 1)
"""Size of a product at which an A100 reaches half of its best: x/(x + half) is 0.95 at 128 GFLOP."""

HALF_SECONDS = _HALF_FLOP / _A100_FLOP_PER_S
"""The same as a time at peak, about 22 microseconds: a faster device needs larger products to be filled."""

_MEMORY = ((1e5, 0.30), (1e6, 0.60), (1e7, 0.75), (1e8, 0.90))
_BEST_MEMORY = _MEMORY[-1][1]


def product_share(flops: float, peak_flop_per_s: float) -> float:
    """Share of its best rate at which a device works on one product of this size, in [0, 1)."""
    half = HALF_SECONDS * peak_flop_per_s
    return flops / (flops + half)


def product_seconds(flops: float, peak_flop_per_s: float, efficiency: float, count: int = 1) -> float:
    """`count` equal products of `flops` in all: flops/(F eta share) = (flops/F + count x half)/eta."""
    if flops <= 0:
        return 0.0
    return (flops / peak_flop_per_s + count * HALF_SECONDS) / efficiency


def memory_share(size: float) -> float:
    """Share of bandwidth for one operation over `size` bytes, relative to a large one, in (0, 1].

    Between the sizes of the table the share is linear in the logarithm of the size.
    """
    if size <= _MEMORY[0][0]:
        return _MEMORY[0][1] / _BEST_MEMORY
    for (small, low), (large, high) in pairwise(_MEMORY):
        if size <= large:
            return (low + (high - low) * log(size / small) / log(large / small)) / _BEST_MEMORY
    return 1.0


def memory_seconds(size: float, bytes_per_s: float, efficiency: float, operations: int = 1) -> float:
    """`operations` equal operations that move `size` bytes in all."""
    if size <= 0:
        return 0.0
    return size / (bytes_per_s * efficiency * memory_share(size / operations))


def operation_seconds(
    flops: float,
    size: float,
    peak_flop_per_s: float,
    bytes_per_s: float,
    efficiency: float,
    memory_efficiency: float,
    launch: float = 0.0,
) -> float:
    """One operation: the roofline of Williams, Waterman, Patterson 2009, and its launch."""
    compute = product_seconds(flops, peak_flop_per_s, efficiency)
    return max(compute, memory_seconds(size, bytes_per_s, memory_efficiency)) + launch
