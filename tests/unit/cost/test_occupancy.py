"""How many requests run for how many steps, against a simulation step by step and exact sums."""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.cost.errors import WorkloadError
from rlflow.cost.lengths import Fixed, Lognormal, Mixture, Trace, largest, mean, second_moment
from rlflow.cost.occupancy import Requests, occupancy, slots_of

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


def test_cache_limits_what_runs():
    response = Fixed(1000)
    assert slots_of(response, 0.0, 8, 8, 8 * 1000) == 8
    assert slots_of(response, 0.0, 8, 8, 8 * 1000 - 1) == 8  # at mean age 500 they fit
    assert slots_of(response, 0.0, 16, 8, 2000) == 4
    assert slots_of(response, 100.0, 16, 8, 1200) == 2
    assert slots_of(response, 0.0, 100, 8, 0) == 1
    assert slots_of(Fixed(0), 0.0, 3, 8, 0) == 3


def test_many_requests_scale():
    """Beyond a few thousand a smaller queue stands for a larger one."""
    response = Lognormal.of_mean(1500, 8192)
    large, small = (occupancy(response, 0.0, Requests(n, 1, 1), s) for n, s in ((40960, 1280), (8192, 256)))
    assert sum(b.steps for b in large) == pytest.approx(sum(b.steps for b in small), rel=0.02)
    assert sum(b.steps * b.running for b in large) == pytest.approx(40960 * mean(response), rel=1e-3)


def test_no_slots():
    with pytest.raises(WorkloadError):
        occupancy(Fixed(5), 0.0, Requests(1, 1, 1), 0)
