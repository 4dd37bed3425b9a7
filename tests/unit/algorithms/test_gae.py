"""GAE, returns, whitening. Ids in brackets are those of the field reports the numbers come from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.algorithms.gae import Clock, discounted_returns, gae
from rlflow.backends.ray_runtime.algorithms.moments import Moments, moments, whiten
from rlflow.backends.ray_runtime.algorithms.rows import positions


def direct(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float, last: float, clock: Clock
) -> np.ndarray:
    """One row, by the sum in the paper's eq. 16 instead of a recursion."""
    steps = np.flatnonzero(mask)
    times = steps if clock == "all" else np.arange(len(steps))
    end = len(mask) if clock == "all" else len(steps)
    deltas = []
    for i, t in enumerate(steps):
        final = i + 1 == len(steps)
        after, gap = (last, end - times[i]) if final else (values[steps[i + 1]], times[i + 1] - times[i])
        deltas.append(rewards[t] + gamma**gap * after - values[t])
    out = np.zeros(len(mask))
    for i, t in enumerate(steps):
        terms = (gamma ** (times[j] - times[i]) * lam ** (j - i) * deltas[j] for j in range(i, len(steps)))
        out[t] = sum(terms)
    return out


def test_a_masked_value_is_never_read() -> None:  # J5
    for value in (100.0, float("nan")):
        got = gae(
            torch.tensor([0.0, 1, 0]),
            torch.tensor([0.0, 0, value]),
            torch.tensor([3]),
            gamma=1.0,
            lam=0.95,
            mask=torch.tensor([1, 1, 0]),
        )
        np.testing.assert_allclose(got.advantages, [0.95, 1, 0], rtol=1e-6)
        np.testing.assert_allclose(got.returns, [0.95, 1, 0], rtol=1e-6)


@pytest.mark.parametrize("clock", ["all", "counted"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 0.0)])
def test_equals_the_sum_in_the_paper(gamma: float, lam: float, clock: Clock) -> None:
    rng = np.random.default_rng(0)
    lengths = [5, 1, 7, 3]
    rewards, values, mask = rng.normal(size=16), rng.normal(size=16), rng.random(16) < 0.6
    last = rng.normal(size=4)
    got = gae(
        torch.from_numpy(rewards),
        torch.from_numpy(values),
        torch.tensor(lengths),
        gamma=gamma,
        lam=lam,
        mask=torch.from_numpy(mask),
        bootstrap=torch.from_numpy(last),
        clock=clock,
    )
    starts = np.cumsum([0, *lengths])
    for row in range(4):
        part = slice(starts[row], starts[row + 1])
        expected = direct(rewards[part], values[part], mask[part], gamma, lam, last[row], clock)
        np.testing.assert_allclose(got.advantages[part], expected, atol=1e-12)
        np.testing.assert_allclose(got.returns[part], np.where(mask[part], expected + values[part], 0), atol=1e-12)


def test_lambda_one_is_return_minus_value_and_lambda_zero_is_the_td_error() -> None:
    rewards, values, lengths = torch.randn(9).double(), torch.randn(9).double(), torch.tensor([4, 5])
    full = gae(rewards, values, lengths, gamma=0.9, lam=1.0)
    torch.testing.assert_close(full.returns, discounted_returns(rewards, lengths, gamma=0.9))
    one = gae(rewards, values, lengths, gamma=0.9, lam=0.0)
    following = torch.where(torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 0]) > 0, values.roll(-1), 0.0)
    torch.testing.assert_close(one.advantages, rewards + 0.9 * following - values)


def test_what_a_step_of_time_is() -> None:
    rewards, mask = torch.tensor([0.0, 0, 0, 1]), torch.tensor([1, 0, 0, 1])
    lengths = torch.tensor([4])
    assert discounted_returns(rewards, lengths, gamma=0.9, mask=mask)[0].item() == pytest.approx(0.729)
    counted = discounted_returns(rewards, lengths, gamma=0.9, mask=mask, clock="counted")
    assert counted[0].item() == pytest.approx(0.9)


def test_rows_do_not_touch_and_empty_rows_are_fine() -> None:
    lengths = torch.tensor([0, 2, 0, 3])
    rewards, values = torch.arange(5.0), torch.ones(5)
    whole = gae(rewards, values, lengths, gamma=0.9, lam=0.9)
    first = gae(rewards[:2], values[:2], lengths[:2], gamma=0.9, lam=0.9)
    second = gae(rewards[2:], values[2:], lengths[2:], gamma=0.9, lam=0.9)
    assert torch.equal(whole.advantages, torch.cat([first.advantages, second.advantages]))
    assert gae(rewards[:0], values[:0], lengths[:0]).advantages.shape == (0,)
    assert positions(lengths).tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("lengths", [[], [0], [3], [1, 0, 2]])
def test_nothing_counted(lengths: list[int]) -> None:
    tokens = sum(lengths)
    garbage = torch.full((tokens,), float("nan"))
    rows = torch.tensor(lengths, dtype=torch.int64)
    got = gae(garbage, garbage, rows, gamma=0.9, lam=0.9, mask=torch.zeros(tokens), bootstrap=torch.ones(len(lengths)))
    assert got.advantages.tolist() == got.returns.tolist() == [0.0] * tokens


def test_columns_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="5 tokens"):
        gae(torch.zeros(4), torch.zeros(4), torch.tensor([2, 3]))


def test_whitening_and_its_split() -> None:
    values, mask = torch.randn(50).double() * 3 + 7, torch.rand(50) < 0.7
    got = whiten(values, mask)
    expected = (values[mask] - values[mask].mean()) / (values[mask].var() + 1e-8).sqrt()
    torch.testing.assert_close(got[mask], expected)
    assert not got[~mask].any()
    found = Moments()
    for part in (slice(0, 13), slice(13, 13), slice(13, 40), slice(40, 50)):
        found = found.merge(moments(values[part], mask[part]))
    split = torch.cat([whiten(values[part], mask[part], over=found) for part in (slice(0, 25), slice(25, 50))])
    torch.testing.assert_close(split, got, rtol=1e-12, atol=1e-12)
    kept = whiten(values, mask, keep_mean=True)
    torch.testing.assert_close(kept[mask].mean(), values[mask].mean())


@pytest.mark.parametrize("values", [[], [5.0], [0.1] * 7])
def test_nothing_to_whiten(values: list[float]) -> None:
    assert not whiten(torch.tensor(values)).any()
    assert not whiten(torch.tensor(values), torch.zeros(len(values))).any()
