"""Advantages per sample. Ids in brackets are those of the field reports the numbers come from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.algorithms.group import GroupAdvantages, opo, remax, rloo, valid_group_normalize
from rlflow.backends.ray_runtime.algorithms.moments import moments
from rlflow.backends.ray_runtime.algorithms.reinforce_pp import (
    centred_per_token,
    reinforce_pp,
    reinforce_pp_baseline,
)

NAN = float("nan")


def mean_only(rewards: np.ndarray, groups: np.ndarray) -> GroupAdvantages:
    return valid_group_normalize(rewards, groups, std=False, epsilon=0.0)


def with_std(rewards: np.ndarray, groups: np.ndarray) -> GroupAdvantages:
    return valid_group_normalize(rewards, groups, std=True, epsilon=1e-6)


def weighted(rewards: np.ndarray, groups: np.ndarray) -> GroupAdvantages:
    return opo(rewards, groups, np.arange(1, len(rewards) + 1)[np.argsort(np.argsort(rewards))])


ALL = [mean_only, with_std, rloo]


def test_a_reward_that_does_not_apply_enters_no_mean() -> None:  # K5
    got = mean_only(np.array([1, NAN, 0, NAN, NAN]), np.array([0, 0, 0, 1, 1]))
    np.testing.assert_array_equal(got.values, [0.5, 0, -0.5, 0, 0])
    np.testing.assert_array_equal(got.counted, [True, False, True, False, False])
    assert got.skipped_groups == 1


def test_infinite_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="sample 1"):
        mean_only(np.array([0, np.inf]), np.array([0, 0]))
    with pytest.raises(ValueError, match="sample 1"):
        remax(np.array([0, np.inf]), np.zeros(2))


def test_groups_of_equal_rewards() -> None:  # H4
    rewards, groups = np.array([0.1] * 8 + [1.0, 0.0]), np.repeat([0, 1], [8, 2])
    for estimator in ALL:
        assert not estimator(rewards, groups).values[:8].any()
    kept = valid_group_normalize(rewards, groups, std=True, epsilon=1e-6)
    dropped = valid_group_normalize(rewards, groups, std=True, epsilon=1e-6, drop_equal=True)
    assert kept.counted.all()
    np.testing.assert_array_equal(dropped.counted, [False] * 8 + [True] * 2)
    assert (kept.skipped_groups, dropped.skipped_groups) == (0, 1)


def test_leave_one_out() -> None:
    got = rloo(np.array([1.0, 2, 6, 0, 4]), np.array([0, 0, 0, 1, 1]))
    np.testing.assert_allclose(got.values, [1 - 4, 2 - 3.5, 6 - 1.5, -4, 4])


def test_leave_one_out_needs_two() -> None:  # H2
    with pytest.raises(ValueError, match="at least 2"):
        rloo(np.array([1.0, 0, 1]), np.array([0, 0, 1]))
    got = rloo(np.array([1.0, NAN]), np.array([0, 0]))  # n = 2, one answer is missing
    assert got.values.tolist() == [0, 0]
    assert not got.counted.any()
    assert got.skipped_groups == 1


def test_optimal_baseline_weighs_by_length() -> None:
    got = opo(np.array([1.0, 0]), np.array([0, 0]), np.array([3, 1]))
    np.testing.assert_allclose(got.values, [0.25, -0.75])
    assert opo(np.array([1.0, 0]), np.array([0, 0]), np.zeros(2)).skipped_groups == 1


def test_remax() -> None:
    got = remax(np.array([1.0, 0, NAN]), np.array([0.25, 0.25, 0.5]))
    np.testing.assert_allclose(got.values, [0.75, -0.25, 0])
    np.testing.assert_array_equal(got.counted, [True, True, False])


@pytest.mark.parametrize("estimator", [*ALL, weighted])
def test_order_and_split_change_no_bit(estimator: Callable[[np.ndarray, np.ndarray], GroupAdvantages]) -> None:  # H8
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(8), 8)
    rewards = rng.normal(size=64)
    rewards[rng.choice(64, 6, replace=False)] = NAN if estimator is not weighted else 0.5
    base = estimator(rewards, groups)
    for _ in range(3):
        order = rng.permutation(64)
        if estimator is not weighted:
            got = estimator(rewards[order], groups[order])
            np.testing.assert_array_equal(got.values, base.values[order])
            np.testing.assert_array_equal(got.counted, base.counted[order])
    if estimator is not weighted:
        for ranks in (2, 4):  # whole groups per rank
            parts = [estimator(rewards[part], groups[part]).values for part in np.split(np.arange(64), ranks)]
            np.testing.assert_array_equal(np.concatenate(parts), base.values)


# --- REINFORCE++ -----------------------------------------------------------------------------------------------------


def test_whitening_is_over_tokens_of_the_batch() -> None:
    rewards = torch.tensor([0.0, 0, 1, 0, -1])  # scores 1 and -1 at the ends of rows of 3 and 2 tokens
    got = reinforce_pp(rewards, torch.tensor([3, 2]))
    values = np.array([1.0, 1, 1, -1, -1])
    np.testing.assert_allclose(got, (values - 0.2) / np.sqrt(values.var(ddof=1) + 1e-8), rtol=1e-6)


def test_masked_tokens_stay_out_of_the_statistics() -> None:
    mask = torch.tensor([1, 0, 1, 1, 1])
    got = reinforce_pp(torch.tensor([0.0, 0, 1, 0, -1]), torch.tensor([3, 2]), mask=mask)
    np.testing.assert_allclose(got, np.array([1, 0, 1, -1, -1]) / np.sqrt(4 / 3 + 1e-8), rtol=1e-6)


def test_baseline_variant_and_its_split() -> None:
    rng = np.random.default_rng(2)
    rewards, groups, lengths = rng.normal(size=12), np.repeat(np.arange(4), 3), torch.from_numpy(rng.integers(1, 6, 12))
    rewards[4] = NAN
    whole = reinforce_pp_baseline(rewards, groups, lengths)
    assert not whole[int(lengths[:4].sum()) : int(lengths[:5].sum())].any()
    parts = [slice(0, 6), slice(6, 12)]
    found = [moments(*centred_per_token(rewards[p], groups[p], lengths[p])) for p in parts]
    over = found[0].merge(found[1])
    got = torch.cat([reinforce_pp_baseline(rewards[p], groups[p], lengths[p], over=over) for p in parts])
    torch.testing.assert_close(got, whole, rtol=1e-6, atol=1e-7)
    counted = whole[whole != 0].double()
    assert abs(float(counted.mean())) < 1e-6
    assert float(counted.std()) == pytest.approx(1, abs=1e-6)


def test_a_batch_without_spread_has_no_advantage() -> None:
    assert not reinforce_pp(torch.tensor([0.0, 0.1, 0.1, 0.1]), torch.tensor([2, 1, 1])).any()
    assert not reinforce_pp_baseline(np.array([3.0]), np.array([0]), torch.tensor([2])).any()
