"""How many requests run in a generation engine, and for how many steps, when all are handed in at once.

All running requests of an engine advance together, one token a step, so the profile over steps does not depend on how
long a step takes. Where every request has a slot it follows from the distribution in closed form; where requests queue,
representative lengths are dealt to the slots as they become free.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heapreplace
from math import sqrt

from rlflow.cost.errors import WorkloadError
from rlflow.cost.lengths import Lengths, largest, mean, second_moment, spread, stratified
from rlflow.cost.normal import quantile
from rlflow.values import dataclass


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
    """Requests wait, so all slots are taken."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What the busiest of equal engines gets, out of `prompts` prompts with n samples each."""

    prompts: int
    samples: int
    engines: int
    spread: bool = True
    """The samples of a prompt may go to different engines."""

    @property
    def busiest(self) -> int:
        """Requests of the engine with the most."""
        if self.spread:
            return -(-self.prompts * self.samples // self.engines)
        return -(-self.prompts // self.engines) * self.samples


def mean_held(response: Lengths, prompt: float) -> float:
    """Tokens that a running request holds on average: its prompt, and half of a length drawn by its length."""
    tokens = mean(response)
    return prompt + (second_moment(response) / (2 * tokens) if tokens else 0.0)


@lru_cache(maxsize=65536)
def slots_of(response: Lengths, prompt: float, requests: int, slots: int, kv_tokens: int) -> int:
    """Requests that run at once: no more than the engine has slots and than its cache holds, at least one.

    Started together they hold the most at some common age. If even that fits, the cache is no limit; otherwise it holds
    as many as it does in the long run, at mean age. What is preempted and computed again is not counted.
    """
    wanted = min(requests, slots)
    if requests <= slots:
        ages = (response.quantile(i / 64) for i in range(1, 65))
        peak = max(wanted * (1 - _below(response, age)) * (prompt + age) for age in ages)
        if peak <= kv_tokens:
            return wanted
    held = mean_held(response, prompt)
    return max(1, min(wanted, int(kv_tokens / held))) if held > 0 else wanted


@lru_cache(maxsize=65536)
def occupancy(response: Lengths, prompt: float, requests: Requests, slots: int) -> tuple[Band, ...]:
    """The profile of an engine with the most requests, to the end of the longest request of all engines.

    Sums that hold exactly: steps x running over the bands are the tokens generated; where no request waits, steps add
    up to E[max] of all requests, and steps x held to requests x (prompt E[l] + E[l^2]/2). The `excess` of a band is the
    expected maximum over the engines of a normal deviate, times the deviation that correlated lengths have.
    """
    if slots < 1 or requests.busiest < 1:
        raise WorkloadError(f"{requests.busiest} requests on {slots} slots")
    # The maximum is an integral by trapezoids, and at least the mean.
    end = max(largest(response, requests.prompts, requests.samples), mean(response))
    n = requests.busiest
    bands = _together(response, prompt, n, end) if n <= slots else _queued(response, prompt, n, slots, end)
    if requests.engines == 1:
        return bands
    return tuple(replace(band, excess=_excess(response, requests, band)) for band in bands)


def _excess(response: Lengths, requests: Requests, band: Band) -> float:
    """The busiest engine beyond the mean one. While all slots are full its requests take longer, by as much as at the
    median length more of them run."""
    n = requests.busiest
    alive = 0.5 if band.full else min(1.0, band.running / n)
    at = response.quantile(1 - alive)
    below, both = response.cdf(at), response.group_cdf(at, 2)
    variance = below * (1 - below)
    if variance <= 0:
        return 0.0
    alike = max(0.0, both - below * below) / variance
    together = -(-requests.samples // requests.engines) if requests.spread else requests.samples
    deviation = sqrt((1 - alive) / (n * alive) * (1 + (together - 1) * alike))
    # The expected maximum of so many normal deviates (Blom 1958).
    most = quantile((requests.engines - 0.375) / (requests.engines + 0.25))
    return deviation * most if band.full else max(0.0, min(deviation * most, n / band.running - 1))


def _together(response: Lengths, prompt: float, n: int, end: float) -> tuple[Band, ...]:
    bands = []
    low = done = weighted = 0.0
    for limit in [*_thresholds(n), 0]:
        # The last band ends with the longest request, not where fewer than one is expected to run.
        high = min(end, response.quantile(1 - limit / n)) if limit else response.maximum
        area, moment = response.limited(high, 1), response.limited(high, 2) / 2
        steps = (high if limit else end) - low
        running, held = n * (area - done), n * (prompt * (area - done) + moment - weighted)
        if steps > 0:
            bands.append(Band(steps, running / steps, held / steps))
        elif bands and running > 0:
            before = bands[-1]
            bands[-1] = Band(before.steps, before.running + running / before.steps, before.held + held / before.steps)
        low, done, weighted = high, area, moment
    return tuple(bands)


_ORDERS = 8
"""Orders of the queue whose mean stands for that of random ones."""


def _queued(response: Lengths, prompt: float, n: int, slots: int, end: float) -> tuple[Band, ...]:
    # A large queue is represented by a smaller one with as many requests a slot; a long one by its last 64 a slot,
    # before which all slots are full in the same way.
    shrink = max(1, min(n // 1024, slots // 32))
    total = n * mean(response)
    n, slots = -(-n // shrink), slots // shrink
    earlier = max(0, n - 64 * slots)
    n -= earlier
    total -= earlier * shrink * mean(response)
    tokens = stratified(response, n)
    if sum(tokens[:-1]) > 0 and total / shrink > end:
        # The longest is as long as of all engines; the others make up the sum.
        share = (total / shrink - end) / sum(tokens[:-1])
        tokens = [*(t * share for t in tokens[:-1]), end]
    queue = spread(tokens)
    # The place of the longest decides most: it stands in the middle of every part of the queue once.
    place = queue.index(tokens[-1])
    turns = [(place - (2 * i + 1) * n // (2 * _ORDERS)) % n for i in range(_ORDERS)]
    profiles = [_profile(queue[turn:] + queue[:turn], prompt, slots) for turn in turns]
    bands = []
    for i, same in enumerate(zip(*profiles, strict=True)):
        steps = sum(band.steps for band in same)
        if steps > 0:
            running = sum(band.steps * band.running for band in same) * shrink / steps
            held = sum(band.steps * band.held for band in same) * shrink / steps
            before = earlier * mean(response) / slots if i == 0 else 0.0
            bands.append(Band(steps / _ORDERS + before, running, held, full=i == 0))
    return tuple(bands)


def _profile(queue: list[float], prompt: float, slots: int) -> list[Band]:
    """Of one order: the time while requests wait, then a band for every power of two, some of no steps."""
    started = [(0.0, t) for t in queue[:slots]]
    free = queue[:slots]
    heapify(free)
    full = 0.0
    for t in queue[slots:]:
        full = free[0]
        heapreplace(free, full + t)
        started.append((full, t))
    left = sorted(free)
    bands, low = [_band(started, prompt, 0.0, full)], full
    last = [(start, length) for start, length in started if start + length > full]
    for limit in [*_thresholds(slots), 0]:
        high = max(low, left[slots - limit - 1])
        bands.append(_band(last, prompt, low, high))
        low = high
    return bands


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


def _thresholds(n: int) -> list[int]:
    """Powers of two below n, largest first."""
    return [1 << i for i in range((n - 1).bit_length() - 1, -1, -1)] if n > 1 else []


def _below(response: Lengths, age: float) -> float:
    """P(length < age): the request that ends now still holds its tokens."""
    return response.cdf(age * (1 - 1e-12))
