"""Seconds of collectives by the alpha-beta model (Hockney 1994; Thakur, Rabenseifner, Gropp 2005).

Unless said otherwise n ranks take part and `size` is the whole message in bytes: what every rank holds before an
all-reduce or a reduce-scatter, and after an all-gather. A group of one rank costs nothing.
"""

from __future__ import annotations

from math import ceil, log2, sqrt

from rlflow.cost.groups import Group, Network
from rlflow.cost.machine import Link

__all__ = [
    "Group",
    "Network",
    "all_gather",
    "all_to_all",
    "best_chunks",
    "chain_broadcast",
    "point_to_point",
    "reduce_scatter",
    "ring_all_reduce",
    "tree_all_reduce",
]


def point_to_point(size: float, link: Link) -> float:
    return link.latency_s + size / link.bytes_per_s


def ring_all_reduce(n: int, size: float, link: Link) -> float:
    return 2 * all_gather(n, size, link)


def all_gather(n: int, size: float, link: Link) -> float:
    """Ring. A reduce-scatter costs the same."""
    if n <= 1:
        return 0.0
    return (n - 1) * link.latency_s + (n - 1) / n * size / link.bytes_per_s


reduce_scatter = all_gather


def tree_all_reduce(n: int, size: float, link: Link) -> float:
    if n <= 1:
        return 0.0
    return 2 * ceil(log2(n)) * link.latency_s + 2 * size / link.bytes_per_s


def chain_broadcast(n: int, size: float, link: Link, chunks: int) -> float:
    """From one rank to the n - 1 others, in `chunks` equal parts that follow each other down the chain."""
    if n <= 1:
        return 0.0
    return (n - 2 + chunks) * (link.latency_s + size / (chunks * link.bytes_per_s))


def best_chunks(n: int, size: float, link: Link) -> int:
    """The number of chunks that makes `chain_broadcast` fastest: sqrt((n - 2) size / (alpha beta)) or a neighbour."""
    if n <= 2 or size <= 0:
        return 1
    if link.latency_s <= 0:
        return max(1, ceil(size))
    ideal = sqrt((n - 2) * size / (link.latency_s * link.bytes_per_s))
    low = max(1, int(ideal))
    return min((low, low + 1), key=lambda chunks: chain_broadcast(n, size, link, chunks))


def all_to_all(n: int, size: float, link: Link) -> float:
    """Every rank holds `size` bytes and sends an equal part to each of the others; `link` is what one rank gets of the
    bisection."""
    if n <= 1:
        return 0.0
    return (n - 1) * link.latency_s + (n - 1) / n * size / link.bytes_per_s
