"""How sequences are packed into micro-batches and dealt to ranks, and what unequal ranks cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace

from rlflow.cost.errors import WorkloadError
from rlflow.cost.lengths import Lengths, mean, second_moment, spread, stratified

_MOST = 4096
"""Sequences that are packed one by one; more are represented by so many."""


def pack(lengths: Sequence[float], budget: float) -> list[list[int]]:
    """Indices of sequences for every micro-batch of at most `budget` tokens, by first-fit decreasing.

    At most 11/9 of the least number, plus one (Johnson 1973). A sequence longer than the budget gets its own.
    """
    if budget <= 0:
        raise WorkloadError(f"a micro-batch of {budget} tokens holds nothing")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    room: list[float] = []
    for i in order:
        for j, left in enumerate(room):
            if lengths[i] <= left:
                bins[j].append(i)
                room[j] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget - lengths[i])
    return bins


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices for every rank, longest first to the least loaded: at most 4/3 of the best maximum (Graham 1969)."""
    if ranks < 1:
        raise WorkloadError(f"cannot deal to {ranks} ranks")
    heap = [(0.0, rank) for rank in range(ranks)]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heap[0]
        dealt[rank].append(i)
        heapreplace(heap, (load + costs[i], rank))
    return dealt


def imbalance(costs: Sequence[float], ranks: int) -> float:
    """Load of the fullest rank over the mean, longest first; 1 for nothing to do."""
    total = sum(costs)
    if total <= 0:
        return 1.0
    loads = [0.0] * ranks
    heapify(loads)
    for cost in sorted(costs, reverse=True):
        heapreplace(loads, loads[0] + cost)
    return max(loads) * ranks / total


@lru_cache(maxsize=4096)
def mean_sequence(prompt: Lengths, response: Lengths) -> float:
    """Tokens of prompt and response."""
    return mean(prompt) + mean(response)


@lru_cache(maxsize=4096)
def mean_square(prompt: Lengths, response: Lengths) -> float:
    """E[(prompt + response)^2] of independent lengths."""
    return second_moment(prompt) + 2 * mean(prompt) * mean(response) + second_moment(response)


def representative(prompt: Lengths, response: Lengths, count: int) -> list[float]:
    """`count` sequences (prompt and response) that stand for a batch, with its mean."""
    return [p + r for p, r in zip(spread(stratified(prompt, count)), stratified(response, count), strict=True)]


@lru_cache(maxsize=4096)
def microbatches(prompt: Lengths, response: Lengths, rows: int, budget: int) -> int:
    """Micro-batches that `rows` sequences of a rank need under a budget of tokens."""
    if rows < 1:
        return 1
    sample = min(rows, _MOST)
    if budget >= 16 * (prompt.maximum + response.maximum):
        # Long bins waste almost nothing; packing one by one would be slow and say the same.
        return max(1, -(-int(rows * mean_sequence(prompt, response)) // budget))
    packed = len(pack(representative(prompt, response, sample), budget))
    return -(-packed * rows // sample)


@lru_cache(maxsize=4096)
def rank_imbalance(prompt: Lengths, response: Lengths, rows: int, ranks: int, quadratic: float) -> float:
    """Load of the fullest of `ranks` data-parallel ranks over the mean, for `rows` sequences in all.

    The cost of a sequence of s tokens is s + quadratic s^2: attention over the products of a token.
    """
    if ranks <= 1 or rows < 1:
        return 1.0
    # Larger batches are represented by fewer ranks with as many rows each.
    shrink = max(1, min(ranks // 2, rows // _MOST))
    rows, ranks = max(1, rows // shrink), max(2, ranks // shrink)
    return imbalance([s + quadratic * s * s for s in representative(prompt, response, rows)], ranks)
