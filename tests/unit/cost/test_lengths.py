"""Length distributions against sampling, the published table of tails, and each other."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.cost.errors import WorkloadError
from rlflow.cost.lengths import Fixed, Lognormal, Mixture, Trace, largest, mean, second_moment, spread, stratified

quick = settings(max_examples=40, derandomize=True, deadline=None)
MODERATE = Lognormal.of_mean(1577, 3072)
LONG = Lognormal.of_mean(7345, 32768)
TWO = Mixture(((0.7, Lognormal(5.0, 0.3, 0.3, 4096)), (0.3, Lognormal(8.0, 0.4, 0.4, 16384))))
TRACED = Trace(tuple(float(x) for x in range(10, 610, 5)), group=4)
EVERY = [Fixed(700), MODERATE, LONG, TWO, TRACED, Lognormal(6.0, 0.0, 0.8, 5000), Lognormal(6.0, 0.8, 0.0, 5000)]


def samples_of(lengths: Lognormal, prompts: int, n: int, batches: int) -> np.ndarray:
    """Independent of the closed forms: draws, shape [batches, prompts, n]."""
    rng = np.random.default_rng(7)
    u = rng.normal(0, lengths.sigma_prompt, (batches, prompts, 1))
    return np.minimum(
        np.exp(lengths.mu + u + rng.normal(0, lengths.sigma_sample, (batches, prompts, n))), lengths.limit
    )


@pytest.mark.parametrize(
    ("sigma", "p99", "p999", "mean_over_median", "over_largest"),
    [
        (0.5, 3.2, 4.7, 1.13, 0.25),
        (0.745, 5.7, 10, 1.32, 0.14),
        (0.9, 8.1, 16, 1.50, 0.10),
        (0.99, 10, 21, 1.63, 0.085),
        (1.2, 16.3, 41, 2.05, 0.058),
    ],
)
def test_table_of_tails(sigma, p99, p999, mean_over_median, over_largest):
    """The published E[max] is exp(mu + sigma z(1 - 1/n)), which is low: ours must be a little above, as sampling is."""
    d = Lognormal(log(1000), 0.0, sigma, 1e9)
    assert d.quantile(0.99) / 1000 == pytest.approx(p99, rel=0.02)
    assert d.quantile(0.999) / 1000 == pytest.approx(p999, rel=0.03)
    assert mean(d) / 1000 == pytest.approx(mean_over_median, rel=0.01)
    ours = mean(d) / largest(d, 512)
    drawn = mean(d) / np.exp(log(1000) + np.random.default_rng(1).normal(0, sigma, (20000, 512))).max(1).mean()
    assert ours == pytest.approx(drawn, rel=0.01)
    assert 0.8 * over_largest < ours <= over_largest


@pytest.mark.parametrize("d", [MODERATE, LONG, Lognormal(6.5, 0.8, 0.1, 9000), Lognormal(6.5, 0.1, 0.8, 9000)])
def test_moments_and_largest_against_draws(d):
    drawn = samples_of(d, 32, 8, 4000)
    assert mean(d) == pytest.approx(drawn.mean(), rel=0.01)
    assert second_moment(d) == pytest.approx((drawn**2).mean(), rel=0.02)
    assert largest(d, 32, 8) == pytest.approx(drawn.max((1, 2)).mean(), rel=0.01)
    assert largest(d, 1, 8) == pytest.approx(drawn.max(2).mean(), rel=0.01)
    assert d.group_cdf(1500, 8) == pytest.approx((drawn.max(2) <= 1500).mean(), abs=0.01)


@pytest.mark.parametrize(("tokens", "limit"), [(1576.6, 3072), (7345, 32768), (10, 100000), (990, 1000), (1, 2)])
@pytest.mark.parametrize("sigma", [0.1, 0.75, 1.5])
def test_of_mean(tokens, limit, sigma):
    d = Lognormal.of_mean(tokens, limit, sigma, 0.3)
    assert mean(d) == pytest.approx(tokens, rel=1e-6)
    assert d.sigma_prompt**2 == pytest.approx(0.3 * sigma**2)
    assert 0 <= d.clipped <= 1


def test_of_mean_needs_room():
    with pytest.raises(WorkloadError, match="not between"):
        Lognormal.of_mean(3072, 3072)


def test_trace_is_exact():
    values = (3.0, 1.0, 4.0, 1.0, 5.0)
    d = Trace(values)
    assert (mean(d), second_moment(d)) == (14 / 5, 52 / 5)
    assert [d.quantile(q) for q in (0, 0.2, 0.4, 0.41, 0.6, 1)] == [0.0, 1, 1, 3, 3, 5]
    # E[max of 2]: sum of x (F(x)^2 - F(x-)^2)
    assert largest(d, 1, 2) == pytest.approx((1 * 4 + 3 * (9 - 4) + 4 * (16 - 9) + 5 * (25 - 16)) / 25)


def test_trace_knows_groups():
    """Two prompts, one short and one long: a group's maximum is that of its prompt."""
    d = Trace((10.0, 10.0, 90.0, 90.0), group=2)
    assert largest(d, 1, 2) == pytest.approx(50)
    assert largest(Trace(d.tokens), 1, 2) == pytest.approx(70)


def test_mixture_is_of_prompts():
    """All samples of a prompt are of one kind, so groups do not mix."""
    d = Mixture(((0.5, Fixed(10)), (0.5, Fixed(90))))
    assert mean(d) == 50
    assert largest(d, 1, 16) == pytest.approx(50)
    assert largest(d, 2, 1) == pytest.approx(10 * 0.25 + 90 * 0.75)


@pytest.mark.parametrize("d", EVERY)
@pytest.mark.parametrize("n", [1, 3, 16])
def test_distributions_are_distributions(d, n):
    points = np.linspace(0, d.maximum, 60)
    for at in (d.cdf, lambda x: d.group_cdf(x, n)):
        values = [at(x) for x in points]
        assert values == sorted(values)
        assert at(d.maximum) == pytest.approx(1)
        assert at(-1) == 0
    assert all(d.group_cdf(x, n) <= d.cdf(x) + 1e-6 for x in points)
    for q in (0.01, 0.3, 0.5, 0.9, 0.999):
        x = d.quantile(q)
        assert d.cdf(x) >= q - 1e-9
        assert d.cdf(x * (1 - 1e-6)) <= q + 1e-4 or isinstance(d, Fixed | Trace)


@pytest.mark.parametrize("d", EVERY)
def test_largest_grows_with_samples_and_is_bounded(d):
    values = [largest(d, prompts, n) for prompts, n in ((1, 1), (1, 4), (4, 4), (64, 4), (4096, 16))]
    assert values == sorted(values)
    assert values[0] == pytest.approx(mean(d), rel=2e-3)
    assert values[-1] <= d.maximum * (1 + 1e-9)


@pytest.mark.parametrize("d", EVERY)
def test_limited_is_the_integral_of_the_tail(d):
    """E[min(L, x)] = integral of P(L > t); E[min(L, x)^2] = integral of 2 t P(L > t): by the midpoint rule."""
    x = 0.7 * d.maximum
    t = (np.arange(40000) + 0.5) * x / 40000
    tail = 1 - np.array([d.cdf(v) for v in t])
    assert d.limited(x, 1) == pytest.approx(tail.mean() * x, rel=1e-3)
    assert d.limited(x, 2) == pytest.approx((2 * t * tail).mean() * x, rel=1e-3)


@pytest.mark.parametrize("d", EVERY)
def test_capping(d):
    limit = 0.5 * d.maximum
    capped = d.capped(limit)
    assert capped.maximum <= limit
    assert mean(capped) == pytest.approx(d.limited(limit, 1))
    assert mean(d.capped(2 * d.maximum)) == pytest.approx(mean(d))


@given(st.integers(1, 300), st.sampled_from(EVERY))
@quick
def test_strata_have_the_mean(count, d):
    values = stratified(d, count)
    assert values == sorted(values)
    assert sum(values) / count == pytest.approx(mean(d))
    assert sorted(spread(values)) == values


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(-1),
        lambda: Trace(()),
        lambda: Trace((1.0, 2.0, 3.0), 2),
        lambda: Mixture(((0.5, Fixed(1)),)),
        lambda: Lognormal(1, -1, 1, 5),
    ],
)
def test_what_is_no_distribution(make):
    with pytest.raises(WorkloadError):
        make()


def test_drift():
    """Lengths that double have twice the median, below the cut."""
    d = Lognormal(log(500), 0.3, 0.3, 1e6).scaled(2)
    assert d.quantile(0.5) == pytest.approx(1000)
    assert exp(d.mu) == pytest.approx(1000)
