"""How many requests run for how many steps, against a simulation step by step and exact sums."""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.cost.errors import WorkloadError
from rlflow.cost.lengths import Fixed, Lognormal, Mixture, Trace, largest, mean, second_moment
from rlflow.cost.occupancy import Requests, headroom, mean_held, mean_reckoned, occupancy, running_at_once

quick = settings(max_examples=60, derandomize=True, deadline=None)
LENGTHS = st.sampled_from(
    [
        Fixed(500),
        Lognormal.of_mean(1500, 8192, 0.75),
        Lognormal.of_mean(7000, 8192, 1.2),
        Lognormal.of_mean(300, 100000, 0.5, 0.9),
        Mixture(((0.8, Fixed(100)), (0.2, Lognormal.of_mean(3000, 8000)))),
        Trace((5.0, 10.0, 900.0, 20.0)),
    ]
)


@given(LENGTHS, st.integers(1, 200), st.integers(1, 16), st.sampled_from([0.0, 77.8, 500.0]))
@quick
def test_exact_sums_where_nobody_waits(response, prompts, samples, prompt):
    n = prompts * samples
    bands = occupancy(response, prompt, Requests(prompts, samples, 1), n)
    assert sum(b.steps for b in bands) == pytest.approx(largest(response, prompts, samples))
    assert sum(b.steps * b.running for b in bands) == pytest.approx(n * mean(response))
    held = n * (prompt * mean(response) + second_moment(response) / 2)
    assert sum(b.steps * b.held for b in bands) == pytest.approx(held)
    assert all(b.steps > 0 for b in bands)


@given(LENGTHS, st.integers(2, 400), st.integers(1, 64))
@quick
def test_exact_sums_where_requests_wait(response, requests, slots):
    bands = occupancy(response, 10.0, Requests(requests, 1, 1), slots)
    assert sum(b.steps * b.running for b in bands) == pytest.approx(requests * mean(response), rel=1e-6)
    assert all(b.running <= slots * (1 + 1e-9) for b in bands if requests > slots)
    assert sum(b.steps for b in bands) >= requests * mean(response) / slots * (1 - 1e-9)


def test_equal_lengths_by_hand():
    """10 requests of 100 tokens on 4 slots: waves of 4, 4 and 2."""
    bands = occupancy(Fixed(100), 0.0, Requests(10, 1, 1), 4)
    assert sum(b.steps for b in bands) == pytest.approx(300)
    assert sum(b.steps * b.running for b in bands) == pytest.approx(1000)
    assert bands[0].full
    assert bands[0].running == pytest.approx(4)


@pytest.mark.parametrize("slots", [16, 64, 128])
def test_waiting_against_random_orders(slots):
    """Steps of the queue against the mean over 300 random batches that are dealt to slots as they become free."""
    response = Lognormal.of_mean(1500, 8192, 0.75, 0.0)
    rng = np.random.default_rng(3)
    total, n = 0.0, 256
    for _ in range(300):
        lengths = np.minimum(np.exp(rng.normal(response.mu, response.sigma, n)), response.limit)
        free = list(lengths[:slots])
        heapify(free)
        for x in lengths[slots:]:
            heapreplace(free, free[0] + x)
        total += max(free)
    bands = occupancy(response, 0.0, Requests(n, 1, 1), slots)
    assert sum(b.steps for b in bands) == pytest.approx(total / 300, rel=0.05)


def test_bands_against_draws():
    """Steps with so many running, against 400 random batches: the profile and not only its sums."""
    response = Lognormal.of_mean(1500, 8192, 0.75, 0.0)
    rng = np.random.default_rng(5)
    lengths = np.sort(np.minimum(np.exp(rng.normal(response.mu, response.sigma, (400, 256))), response.limit), axis=1)
    bands = occupancy(response, 0.0, Requests(256, 1, 1), 256)
    end = 0.0
    for band, left in zip(bands, (128, 64, 32, 16, 8), strict=False):
        end += band.steps
        assert end == pytest.approx(lengths[:, 255 - left].mean(), rel=0.03)


def test_busiest_engine():
    assert Requests(10, 4, 8).busiest == 5
    assert Requests(10, 4, 8, spread=False).busiest == 8
    spread, grouped = (
        occupancy(Lognormal.of_mean(1500, 8192), 0.0, Requests(64, 16, 8, spread=s), 128) for s in (True, False)
    )
    assert all(0 <= a.excess < b.excess for a, b in zip(spread[2:], grouped[2:], strict=True))


def test_excess_of_the_busiest_against_draws():
    """The engine with the most running requests at the median length, of 8 with 16 groups of 8 correlated samples."""
    response = Lognormal.of_mean(1500, 100000, 0.75, 0.5)
    rng = np.random.default_rng(9)
    u = rng.normal(0, response.sigma_prompt, (2000, 8, 16, 1))
    lengths = np.exp(response.mu + u + rng.normal(0, response.sigma_sample, (2000, 8, 16, 8)))
    bands = occupancy(response, 0.0, Requests(128, 8, 8, spread=False), 128)
    for band in bands[1:4]:
        at = response.quantile(1 - band.running / 128)
        drawn = (lengths > at).sum((2, 3)).max(1).mean() / band.running - 1
        assert band.excess == pytest.approx(drawn, rel=0.15)


def test_headroom_where_the_cache_is_a_limit():
    """At a mean age of 500 of 1,000 tokens."""
    response = Fixed(1000)
    assert headroom(response, 0.0, 8, 8, 8 * 1000) == 0
    assert headroom(response, 0.0, 8, 8, 8 * 1000 - 1) == 500
    assert headroom(response, 100.0, 16, 8, 10**6) == 500  # more wait than run: ages differ
    assert headroom(Fixed(0), 0.0, 3, 8, 0) == 0


def test_cache_limits_what_runs():
    """Requests of uniform ages hold 500 and are counted as 625 on average: half of them as 500, half as 500 to 1,000."""
    response = Fixed(1000)
    assert mean_reckoned(response, 100.0, 500) == pytest.approx(100 + 625)
    assert mean_reckoned(response, 100.0, 0) == pytest.approx(mean_held(response, 100.0))
    assert running_at_once(response, 0.0, 8, 8, 8 * 1000) == 8
    assert running_at_once(response, 0.0, 16, 8, 2000) == 3
    assert running_at_once(response, 100.0, 16, 8, 1500) == 2
    assert running_at_once(response, 0.0, 100, 8, 0) == 1
    assert running_at_once(Fixed(0), 0.0, 3, 8, 0) == 3


def test_equal_lengths_in_a_small_cache_by_hand():
    """10 of 100 tokens, each counted as 50 at least, in a cache of 150: three start, and when they end the next three."""
    bands = occupancy(Fixed(100), 0.0, Requests(10, 1, 1), 10, 150)
    assert sum(b.steps for b in bands) == pytest.approx(400)
    assert sum(b.steps * b.running for b in bands) == pytest.approx(1000)
    assert bands[0].admitted == pytest.approx(7)


@given(LENGTHS, st.integers(2, 100), st.integers(1, 8), st.integers(1, 64), st.sampled_from([0.05, 0.2, 0.5, 1.0, 3.0]))
@quick
def test_a_small_cache_changes_when_requests_run_and_nothing_else(response, prompts, samples, slots, share):
    """All tokens are generated, none twice; a smaller cache never ends sooner."""
    requests, room = Requests(prompts, samples, 1), prompts * samples * mean_held(response, 10.0)
    small, large = (occupancy(response, 10.0, requests, slots, max(1, int(room * s))) for s in (share / 2, share))
    for bands in (small, large):
        total = sum(b.steps * b.running for b in bands)
        assert total == pytest.approx(prompts * samples * mean(response), rel=1e-6)
    assert sum(b.steps for b in small) >= sum(b.steps for b in large) * 0.98


def test_the_last_of_many_engines_ends_later():
    """Each has a queue; some engine begins a longest request last."""
    response = Lognormal.of_mean(1500, 8192)
    one, many = (occupancy(response, 0.0, Requests(16 * e, 8, e), 16) for e in (1, 32))
    assert sum(b.steps for b in many) > 1.1 * sum(b.steps for b in one)


def test_many_requests_scale():
    """Beyond a few thousand a smaller queue stands for a larger one."""
    response = Lognormal.of_mean(1500, 8192)
    large, small = (occupancy(response, 0.0, Requests(n, 1, 1), s) for n, s in ((40960, 1280), (8192, 256)))
    assert sum(b.steps for b in large) == pytest.approx(sum(b.steps for b in small), rel=0.02)
    assert sum(b.steps * b.running for b in large) == pytest.approx(40960 * mean(response), rel=1e-3)


def test_no_slots():
    with pytest.raises(WorkloadError):
        occupancy(Fixed(5), 0.0, Requests(1, 1, 1), 0)
