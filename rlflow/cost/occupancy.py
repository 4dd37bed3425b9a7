"""How many requests run in a generation engine, and for how many steps, when all are handed in at once.

All running requests of an engine advance together, one token a step, so the profile over steps does not depend on how
long a step takes. Where every request has a slot and room in the cache it follows from the distribution in closed form;
where requests queue, representative lengths are admitted one after the other (`occupancy_queue`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, inf, log, sqrt

from rlflow.cost.errors import WorkloadError
from rlflow.cost.lengths import Lengths, largest, mean, second_moment
from rlflow.cost.normal import quantile
from rlflow.cost.occupancy_queue import Band, Limit, powers_below, queued
from rlflow.values import dataclass


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


def mean_reckoned(response: Lengths, prompt: float, expected: float) -> float:
    """Tokens that admission counts for a running request on average: its prompt, and what it has generated or, where
    that is less, `expected`.

    With S the share of longer responses and m their mean, a running request has an age of density S(a)/m.
    """
    tokens = mean(response)
    if not tokens:
        return prompt + expected
    longer = (second_moment(response) - response.limited(expected, 2)) / 2
    longer -= expected * (tokens - response.limited(expected, 1))
    return prompt + expected + max(0.0, longer) / tokens


@lru_cache(maxsize=65536)
def headroom(response: Lengths, prompt: float, requests: int, slots: int, kv_tokens: int) -> int:
    """Tokens of a response that an engine reckons with when it admits another: 0 where the cache is no limit.

    Requests that start together hold the most at some common age; if even that fits, so does everything. Otherwise what
    a running request has generated on average, so that the cache is not full before the first ones have ended: what is
    thrown out of it has to be computed again, and all engines in lock step wait for that.
    """
    if requests <= slots:
        ages = (response.quantile(i / 64) for i in range(1, 65))
        peak = max(requests * (1 - _below(response, age)) * (prompt + age) for age in ages)
        if peak <= kv_tokens:
            return 0
    return ceil(mean_held(response, prompt) - prompt)


@lru_cache(maxsize=65536)
def running_at_once(response: Lengths, prompt: float, requests: int, slots: int, kv_tokens: int) -> int:
    """Requests that run at once in the long run: as many as the engine has slots and its cache admits, at least one."""
    expected = headroom(response, prompt, requests, slots, kv_tokens)
    wanted = min(requests, slots)
    each = mean_reckoned(response, prompt, expected)
    return max(1, min(wanted, int(kv_tokens / each))) if expected and each > 0 else wanted


@lru_cache(maxsize=65536)
def occupancy(
    response: Lengths, prompt: float, requests: Requests, slots: int, kv_tokens: int | None = None
) -> tuple[Band, ...]:
    """The profile of an engine with the most requests, to the end of the longest request of all engines.

    Admission as `headroom` says; `kv_tokens` None: a cache that is no limit. Nothing is thrown out of it here.

    Sums that hold exactly: steps x running over the bands are the tokens generated; where no request waits, steps add
    up to E[max] of all requests, and steps x held to requests x (prompt E[l] + E[l^2]/2). The `excess` of a band is the
    expected maximum over the engines of a normal deviate, times the deviation that correlated lengths have.
    """
    if slots < 1 or requests.busiest < 1:
        raise WorkloadError(f"{requests.busiest} requests on {slots} slots")
    # The maximum is an integral by trapezoids, and at least the mean.
    end = max(largest(response, requests.prompts, requests.samples), mean(response))
    n = requests.busiest
    expected = 0 if kv_tokens is None else headroom(response, prompt, n, slots, kv_tokens)
    if n <= slots and not expected:
        bands = _together(response, prompt, n, end)
    else:
        limit = Limit(prompt, min(n, slots), kv_tokens if expected and kv_tokens is not None else inf, expected)
        at_once = slots if kv_tokens is None else running_at_once(response, prompt, n, slots, kv_tokens)
        bands = queued(response, n, limit, at_once, end, requests.engines * _independent(response, requests))
    if requests.engines == 1:
        return bands
    return tuple(replace(band, excess=_excess(response, requests, band)) for band in bands)


def _excess(response: Lengths, requests: Requests, band: Band) -> float:
    """The busiest engine beyond the mean one: more requests of it run at the length at which so many are left. While
    requests wait it takes longer, by as much as its tokens are more."""
    n = requests.busiest
    alive = 0.5 if band.full else min(1.0, band.running / n)
    at = response.quantile(1 - alive)
    below, both = response.cdf(at), response.group_cdf(at, 2)
    variance = below * (1 - below)
    if variance <= 0:
        return 0.0
    alike = max(0.0, both - below * below) / variance
    together = -(-requests.samples // requests.engines) if requests.spread else requests.samples
    # The expected maximum of so many normal deviates (Blom 1958).
    most = quantile((requests.engines - 0.375) / (requests.engines + 0.25))
    single = second_moment(response) / mean(response) ** 2 - 1 if band.full else (1 - alive) / alive
    deviation = sqrt(max(0.0, single) / n * (1 + (together - 1) * alike))
    return deviation * most if band.full else max(0.0, min(deviation * most, n / band.running - 1))


def _independent(response: Lengths, requests: Requests) -> float:
    """Independent lengths that have as long a longest one, over those there are: samples of a prompt are alike."""
    at = response.quantile(1 - 1 / (requests.prompts * requests.samples + 1)) * (1 - 1e-12)
    one, group = response.cdf(at), response.group_cdf(at, requests.samples)
    return log(group) / (requests.samples * log(one)) if 0 < group < 1 and 0 < one < 1 else 1.0


def _together(response: Lengths, prompt: float, n: int, end: float) -> tuple[Band, ...]:
    bands = []
    low = done = weighted = 0.0
    for limit in [*powers_below(n), 0]:
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


def _below(response: Lengths, age: float) -> float:
    """P(length < age): the request that ends now still holds its tokens."""
    return response.cdf(age * (1 - 1e-12))
