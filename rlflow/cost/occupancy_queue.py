"""Requests that queue for slots or for room in the cache: representative lengths, admitted as an engine admits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import prod

from rlflow.cost.lengths import Lengths, mean, spread, stratified


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of steps, with means over it."""

    steps: float
    running: float
    """Requests."""
    held: float
    """Tokens in the cache of keys and values, prompts included."""
    excess: float = 0.0
    """What the busiest engine has beyond the mean one, as a share: of running requests, or of steps while all slots are
    full."""
    full: bool = False
    """Requests wait, so as many run as may."""
    admitted: float = 0.0
    """Requests that enter after its beginning."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What admission looks at. A request enters when a slot is free and the cache has room for it and for those that
    run, each counted with its prompt and with what it has generated or, where that is less, is expected to."""

    prompt: float
    slots: int
    kv_tokens: float
    """Infinite where only slots count."""
    expected: float


_ORDERS = 8
"""Orders of the queue whose mean stands for that of random ones."""


_GRID = 192
"""Points of the integral of the last end."""
_STARTS = 32
"""Moments that stand for those at which requests start."""


def queued(response: Lengths, n: int, limit: Limit, at_once: int, longest: float, engines: float) -> tuple[Band, ...]:
    """The profile of `n` requests of which about `at_once` run, to the end of the last request of all engines.

    `longest`: the expected length of the longest request of all engines. `engines`: how many; fewer where samples are
    alike: as many as would make the longest as long if lengths were independent.
    """
    # A large queue is represented by a smaller one with as many requests a slot; a long one by its last 64 a slot,
    # before which as many run all the time.
    shrink = max(1, min(n // 1024, at_once // 32))
    total = n * mean(response)
    n, at_once = -(-n // shrink), at_once // shrink
    limit = Limit(limit.prompt, max(1, limit.slots // shrink), limit.kv_tokens / shrink, limit.expected)
    earlier = max(0, n - 64 * at_once)
    n -= earlier
    total -= earlier * shrink * mean(response)
    tokens = stratified(response, n)
    if sum(tokens[:-1]) > 0 and total / shrink > longest:
        # The longest is as long as of all engines; the others make up the sum.
        share = (total / shrink - longest) / sum(tokens[:-1])
        tokens = [*(t * share for t in tokens[:-1]), longest]
    queue = spread(tokens)
    # The place of the longest decides most: it stands in the middle of every part of the queue once.
    place = queue.index(tokens[-1])
    turns = [(place - (2 * i + 1) * n // (2 * _ORDERS)) % n for i in range(_ORDERS)]
    admitted = [_admitted(queue[turn:] + queue[:turn], limit) for turn in turns]
    profiles = [_profile(started, limit) for started in admitted]
    bands: list[Band] = []
    for same in zip(*profiles, strict=True):
        steps = sum(band.steps for band in same)
        if steps > 0:
            running = sum(band.steps * band.running for band in same) * shrink / steps
            held = sum(band.steps * band.held for band in same) * shrink / steps
            bands.append(Band(steps / _ORDERS, running, held))
    late = _last_end(response, admitted, engines * shrink) - sum(band.steps for band in bands)
    bands = _longer(bands, late)
    if profiles[0][0].steps > 0:
        # As many ran before as in the part that was looked at.
        first = bands[0]
        before = earlier * shrink * mean(response) / first.running
        entered = earlier + sum(start > 0 for started in admitted for start, _ in started) / _ORDERS
        bands[0] = replace(first, steps=first.steps + before, full=True, admitted=entered * shrink)
    return tuple(bands)


def _last_end(response: Lengths, orders: Sequence[Sequence[tuple[float, float]]], engines: float) -> float:
    """E[max] of the ends of all requests of all engines, with lengths drawn anew for the starts of these orders.

    Of an engine all have ended by x with the product of P(length <= x - start); the maximum is the integral of 1 less
    that product to the power of the engines.
    """
    starts = sorted(start for order in orders for start, _ in order)
    each = max(1, len(starts) // _STARTS)
    parts = [starts[i : i + each] for i in range(0, len(starts), each)]
    weighted = [(sum(part) / len(part), len(part) * engines / len(orders)) for part in parts]
    low, reach = starts[-1], response.quantile(1 - 1e-3 / (len(starts) * engines))
    total, before = low, 1.0
    for i in range(_GRID + 1):
        x = low + reach * i / _GRID
        # From the left: a point mass belongs to lengths that reach it.
        after = 1.0 - prod(response.cdf((x - start) * (1 - 1e-12)) ** weight for start, weight in weighted)
        total += reach / _GRID * (before + after) / 2 if i else 0.0
        before = after
    return total


def _longer(bands: list[Band], steps: float) -> list[Band]:
    """The last band lasts so much longer, with as much work in it."""
    last = bands[-1]
    if steps <= 0:
        return bands
    share = last.steps / (last.steps + steps)
    longer = replace(last, steps=last.steps + steps, running=last.running * share, held=last.held * share)
    return [*bands[:-1], longer]


def _profile(started: list[tuple[float, float]], limit: Limit) -> list[Band]:
    """Of one order: the time while requests wait, then a band for every power of two, some of no steps."""
    full = started[-1][0]
    left = sorted(start + length for start, length in started if start + length > full)
    bands, low = [_band(started, limit.prompt, 0.0, full)], full
    last = [(start, length) for start, length in started if start + length > full]
    for power in [*powers_below(min(len(started), limit.slots)), 0]:
        high = max(low, left[len(left) - power - 1]) if power < len(left) else low
        bands.append(_band(last, limit.prompt, low, high))
        low = high
    return bands


def _admitted(queue: list[float], limit: Limit) -> list[tuple[float, float]]:
    """(start, length) of every request, in the order of the queue."""
    expected, each = limit.expected, limit.prompt + limit.expected
    started: list[tuple[float, float]] = []
    ends: list[tuple[float, float, float]] = []
    now = beyond = 0.0
    passed = many = 0
    """Of `started`, those older than expected; of these, how many run, and in `beyond` the sum of their starts."""
    for length in queue:
        while ends:
            reckoned = len(ends) * each + many * (now - expected) - beyond
            if len(ends) < limit.slots and reckoned + each <= limit.kv_tokens:
                break
            now, start, tokens = heappop(ends)
            while passed < len(started) and started[passed][0] + expected <= now:
                before, other = started[passed]
                passed += 1
                if other > expected:
                    many, beyond = many + 1, beyond + before
            if tokens > expected:
                many, beyond = many - 1, beyond - start
        started.append((now, length))
        heappush(ends, (now + length, now, length))
    return started


def _band(started: list[tuple[float, float]], prompt: float, low: float, high: float) -> Band:
    """Means over the steps from low to high of requests with a start and a length."""
    running = held = 0.0
    for start, length in started:
        first, last = max(low, start) - start, min(high, start + length) - start
        if last > first:
            running += last - first
            held += prompt * (last - first) + (last * last - first * first) / 2
    steps = high - low
    return Band(steps, running / steps, held / steps) if steps > 0 else Band(0.0, 0.0, 0.0)


def powers_below(n: int) -> list[int]:
    """Powers of two below n, largest first."""
    return [1 << i for i in range((n - 1).bit_length() - 1, -1, -1)] if n > 1 else []
