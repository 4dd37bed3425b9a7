"""Numbers worked by hand; the ids in brackets are those of the field reports they come from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.algorithms.advantages import group_normalize, groups_from_sizes
from rlflow.backends.ray_runtime.algorithms.aggregate import Aggregate, aggregate, token_weights
from rlflow.backends.ray_runtime.algorithms.kl import Estimator, kl_estimate
from rlflow.backends.ray_runtime.algorithms.losses import entropy, ppo_clip
from rlflow.backends.ray_runtime.randomness import minibatch_permutation, permutation, uniforms

PINNED_UNIFORMS = [0.8133540609793564, 0.7513314251083365, 0.6716490436969984]
PINNED_PERMUTATION = [6, 7, 2, 1, 3, 5, 0, 4]

# --- group advantages ------------------------------------------------------------------------------------------------


def test_groups_of_unequal_size_keep_their_own_mean() -> None:  # H1, T17
    rewards = np.array([1.0, 0, 1, 0, 0, 1, 1])
    got = group_normalize(rewards, groups_from_sizes([3, 4], 7), std=False, epsilon=1e-6)
    np.testing.assert_allclose(got, [1 / 3, -2 / 3, 1 / 3, -0.5, -0.5, 0.5, 0.5], atol=1e-15)


@pytest.mark.parametrize("sizes", [[3, 3], [3, 5], [7, 0]])
def test_sizes_that_do_not_fit_are_refused(sizes: list[int]) -> None:  # T17
    with pytest.raises(ValueError, match="group"):
        groups_from_sizes(sizes, 7)


def test_normalised_inside_groups_not_over_the_batch() -> None:  # H3
    got = group_normalize(np.array([0.0, 0, 0, 1, 10, 10, 10, 11]), np.repeat([0, 1], 4), std=True, epsilon=1e-6)
    np.testing.assert_array_equal(got[:4], got[4:])
    # sample deviation of 0, 0, 0, 1 is 0.5
    np.testing.assert_allclose(got[:4], [-0.25 / 0.500001] * 3 + [0.75 / 0.500001], rtol=1e-12)


@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_and_single_samples_give_exactly_zero(std: bool) -> None:  # H2, H4
    rewards = np.array([0.1] * 8 + [0.7] + [1 / 3] * 3)
    groups = np.array([0] * 8 + [1] + [2] * 3)
    assert not group_normalize(rewards, groups, std=std, epsilon=1e-6).any()


def test_order_of_samples_changes_no_bit() -> None:  # H8
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=60), rng.integers(0, 7, size=60) * 5 - 3
    base = group_normalize(rewards, groups, std=True, epsilon=1e-6)
    for _ in range(5):
        order = rng.permutation(60)
        np.testing.assert_array_equal(
            group_normalize(rewards[order], groups[order], std=True, epsilon=1e-6), base[order]
        )


def test_no_samples() -> None:
    assert group_normalize(np.zeros(0), np.zeros(0, dtype=np.int64), std=True, epsilon=1e-6).shape == (0,)


# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "value", "slope"), [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.106531, 0.393469)]
)
def test_kl_estimators(estimator: Estimator, value: float, slope: float) -> None:  # I3
    logp = torch.tensor([-1.0], requires_grad=True)
    kl = kl_estimate(logp, torch.tensor([-1.5]), estimator)
    kl.sum().backward()
    assert logp.grad is not None
    assert kl.item() == pytest.approx(value, abs=1e-6)
    assert logp.grad.item() == pytest.approx(slope, abs=1e-6)


def test_policy_gradient_and_kl_add_up_and_a_step_lowers_kl() -> None:  # I2
    assert 0.2 + 0.1 * 0.5 == pytest.approx(0.25)
    logits = torch.tensor([0.0, 0.0], requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.0]), -1)

    def kl() -> torch.Tensor:  # the exact KL as an expectation of k3 over the policy
        logp = torch.log_softmax(logits, -1)
        return (logp.exp() * kl_estimate(logp, reference, "k3")).sum()

    before = kl()
    before.backward()
    assert logits.grad is not None
    with torch.no_grad():
        logits -= 0.5 * logits.grad
    assert kl() < before


def test_clip_bounds_and_metrics() -> None:
    logp = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5, 1.0])).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    got = ppo_clip(logp, torch.zeros(5), advantages, 0.2, 0.28)
    torch.testing.assert_close(got.loss.detach(), torch.tensor([-1.28, -0.5, 1.5, 0.8, -2.0]))
    assert got.clipped.tolist() == [1, 0, 0, 1, 0]
    torch.testing.assert_close(got.kl, -logp.detach())
    got.loss.sum().backward()
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, torch.tensor([0.0, -0.5, 1.5, 0.0, -2.0]))


def test_a_far_off_token_does_not_make_the_loss_infinite() -> None:
    got = ppo_clip(torch.tensor([0.0]), torch.tensor([-1000.0]), torch.tensor([-1.0]), 0.2, 0.2)
    assert torch.isfinite(got.loss).all()


def test_entropy_of_uniform_and_certain() -> None:
    log_probs = torch.log_softmax(torch.tensor([[0.0] * 4, [100.0, 0, 0, 0]]), -1)
    torch.testing.assert_close(entropy(log_probs), torch.tensor([math.log(4), 0.0]))


# --- aggregation -----------------------------------------------------------------------------------------------------


def test_token_mean_is_defined_over_the_mini_batch() -> None:  # I1, T18
    lengths = torch.tensor([2, 8])
    values = torch.tensor([1.0] * 2 + [0.5] * 8)
    whole = aggregate(values, token_weights(lengths, "token_mean", total_tokens=10, total_rows=2))
    assert whole.item() == pytest.approx(0.6)
    parts = [
        aggregate(values[:2], token_weights(lengths[:1], "token_mean", total_tokens=10, total_rows=2)),
        aggregate(values[2:], token_weights(lengths[1:], "token_mean", total_tokens=10, total_rows=2)),
    ]
    assert sum(part.item() for part in parts) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("how", "expected"), [("token_mean", 0.6), ("seq_mean_token_mean", 0.75), ("seq_mean_token_sum", 3.0)]
)
def test_aggregates(how: Aggregate, expected: float) -> None:
    values = torch.tensor([1.0] * 2 + [0.5] * 8)
    weights = token_weights(torch.tensor([2, 8]), how, total_tokens=10, total_rows=2)
    assert aggregate(values, weights).item() == pytest.approx(expected)


@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_nothing_counted_gives_zero_loss_and_gradient(how: Aggregate) -> None:  # I6
    values = torch.tensor([float("nan"), 1.0, 2.0], requires_grad=True)
    weights = token_weights(torch.tensor([2, 1]), how, total_tokens=0, total_rows=2, mask=torch.zeros(3))
    loss = aggregate(values, weights)
    loss.backward()
    assert loss.item() == 0
    assert values.grad is not None
    assert values.grad.tolist() == [0, 0, 0]
    assert token_weights(torch.tensor([], dtype=torch.int64), how, total_tokens=0, total_rows=0).shape == (0,)


def test_masked_tokens_do_not_enter_a_row_mean() -> None:  # J6
    weights = token_weights(
        torch.tensor([4]), "seq_mean_token_mean", total_tokens=2, total_rows=1, mask=torch.tensor([1, 1, 0, 0])
    )
    assert aggregate(torch.tensor([1.0, 1, 10, 10]), weights).item() == pytest.approx(1.0)


# --- random streams --------------------------------------------------------------------------------------------------


def test_a_stream_depends_on_its_coordinates_only() -> None:
    base = uniforms(7, 3, 11, 2, 16)
    np.testing.assert_array_equal(uniforms(7, 3, 11, 2, 5), base[:5])
    assert base.dtype == np.float64
    assert ((base >= 0) & (base < 1)).all()
    others = [
        uniforms(8, 3, 11, 2, 16),
        uniforms(7, 4, 11, 2, 16),
        uniforms(7, 3, 12, 2, 16),
        uniforms(7, 3, 11, 3, 16),
    ]
    assert all(not np.intersect1d(base, other).size for other in others)


def test_streams_never_change() -> None:
    # A change of these numbers changes what every old run would repeat to.
    np.testing.assert_allclose(uniforms(0, 0, 0, 0, 3), PINNED_UNIFORMS, rtol=0, atol=0)
    assert permutation(0, 0, 8).tolist() == PINNED_PERMUTATION


def test_streams_are_uniform() -> None:
    draws = np.concatenate([uniforms(0, step, uid, 0, 32) for step in range(20) for uid in range(50)])
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    assert abs(counts - len(draws) / 20).max() < 5 * math.sqrt(len(draws) / 20)


def test_permutations() -> None:
    first = permutation(1, 0, 100)
    assert sorted(first) == list(range(100))
    assert (first == permutation(1, 0, 100)).all()
    assert (first != permutation(1, 1, 100)).any()
    assert (minibatch_permutation(1, 0, 0, 100) != first).any()
