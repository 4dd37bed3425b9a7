"""Policy, value and preference losses, and importance weights, by hand-worked numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.algorithms.correction import correction_metrics, importance_weights
from rlflow.backends.ray_runtime.algorithms.imitation import best_of_n, nll
from rlflow.backends.ray_runtime.algorithms.losses import ppo_clip
from rlflow.backends.ray_runtime.algorithms.policy import cispo, decoupled_ppo, ppo_dual_clip, reinforce
from rlflow.backends.ray_runtime.algorithms.preference import best_worst_pairs, dpo, ipo
from rlflow.backends.ray_runtime.algorithms.sequence import gspo, gspo_token, sequence_ppo_clip
from rlflow.backends.ray_runtime.algorithms.token_sum import row_weights, token_sum_weights
from rlflow.backends.ray_runtime.algorithms.value import explained_variance, value_clip


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def data(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slope(loss: torch.Tensor, at: torch.Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss.sum(), at)
    return [float(x) for x in found]


# --- policy ----------------------------------------------------------------------------------------------------------


def test_dual_clip_bounds_only_negative_advantages() -> None:
    logp = torch.log(data(1.5, 5.0, 5.0, 0.5)).requires_grad_()
    got = ppo_dual_clip(logp, torch.zeros(4), data(-1, -1, 1, -1), 0.2, 0.2, 3.0)
    assert got.loss.tolist() == pytest.approx([1.5, 3.0, -1.2, 0.8])
    assert got.floored.tolist() == [0, 1, 0, 0]
    assert got.clipped.tolist() == [0, 0, 1, 1]
    assert slope(got.loss, logp) == pytest.approx([1.5, 0, 0, 0])
    with pytest.raises(ValueError, match="above"):
        ppo_dual_clip(logp, torch.zeros(4), torch.ones(4), 0.2, 0.28, 1.2)


def test_cispo_keeps_every_gradient() -> None:
    logp = torch.log(data(1.5, 0.5, 1.5, 1.0)).requires_grad_()
    got = cispo(logp, torch.zeros(4), data(1, 1, -1, 2), 0.2, 0.2)
    assert slope(got.loss, logp) == pytest.approx([-1.2, -0.8, 1.2, -2])
    assert got.clipped.tolist() == [1, 1, 1, 0]
    free = cispo(logp, torch.zeros(4), data(1, 1, -1, 2), None, 0.2)
    assert slope(free.loss, logp) == pytest.approx([-1.2, -0.5, 1.2, -2])


def test_reinforce_is_ppo_at_ratio_one() -> None:
    logp, advantages = leaf(-0.5, -2.0), data(1.0, -3.0)
    clipped = ppo_clip(logp, logp.detach(), advantages, 0.2, 0.2)
    assert slope(reinforce(logp, advantages), logp) == pytest.approx(slope(clipped.loss, logp))


# --- correction ------------------------------------------------------------------------------------------------------


def test_truncated_importance_sampling_uses_the_old_policy() -> None:  # F7
    behaviour, old, new = data(-1.0), data(-0.9).requires_grad_(), leaf(-0.5)
    found = importance_weights(old, behaviour, torch.tensor([1]), cap=2.0)
    assert found.weights.item() == pytest.approx(math.exp(0.1), rel=1e-12)
    assert not found.weights.requires_grad
    loss = decoupled_ppo(new, old.detach(), data(1.0), 0.2, 0.2, found.weights).loss
    assert loss.item() == pytest.approx(-1.32620, abs=1e-5)
    assert slope(loss, new) == [0.0]


def test_truncate_and_mask() -> None:
    old, behaviour, lengths = torch.log(data(1, 3, 0.1, 1)), torch.zeros(4).double(), torch.tensor([2, 2])
    assert importance_weights(old, behaviour, lengths).weights.tolist() == pytest.approx([1, 2, 0.1, 1])
    both = importance_weights(old, behaviour, lengths, cap=2.0, floor=0.5, outside="mask")
    assert both.weights.tolist() == pytest.approx([1, 0, 0, 1])
    assert both.outside.tolist() == [False, True, True, False]
    product = importance_weights(old, behaviour, lengths, level="sequence", cap=2.0)
    assert product.weights.tolist() == pytest.approx([2, 2, 0.1, 0.1])
    mean = importance_weights(old, behaviour, lengths, level="sequence_mean", cap=None)
    assert mean.weights.tolist() == pytest.approx([3**0.5] * 2 + [0.1**0.5] * 2)


def test_a_product_over_a_long_response_explodes_and_says_so() -> None:  # G6
    old, behaviour = torch.full((110,), 0.012).double(), torch.zeros(110).double()
    lengths = torch.tensor([100, 10])
    found = importance_weights(old, behaviour, lengths, level="sequence", cap=3.0, outside="mask")
    assert found.raw[0].item() == pytest.approx(3.3201, abs=1e-4)
    assert found.weights[0].item() == 0
    metrics = correction_metrics(found, lengths, level="sequence", total_tokens=110, total_rows=2)
    assert metrics["correction/sequence_outside_share"] == 0.5
    token = importance_weights(old, behaviour, lengths, cap=3.0, outside="mask")
    metrics = correction_metrics(token, lengths, level="token", total_tokens=110, total_rows=2)
    assert metrics == {
        "correction/token_weight_mean": pytest.approx(math.exp(0.012)),
        "correction/token_outside_share": 0.0,
    }


def test_tokens_that_nobody_sampled_may_hold_anything() -> None:
    behaviour = data(-1.0, float("nan"), -1.0)
    mask = torch.tensor([1, 0, 1])
    for level in ("token", "sequence", "sequence_mean"):
        found = importance_weights(data(-1, -1, -1), behaviour, torch.tensor([3]), level=level, mask=mask)
        assert found.weights.tolist() == [1, 0, 1]
        metrics = correction_metrics(found, torch.tensor([3]), level=level, total_tokens=2, total_rows=1, mask=mask)
        assert list(metrics.values()) == [1.0, 0.0]


# --- sequence --------------------------------------------------------------------------------------------------------


def test_gspo_by_hand() -> None:
    logp = leaf(0.2, 0.4, -0.1)  # old 0: mean log-ratio 0.3 and -0.1
    got = gspo(logp, torch.zeros(3).double(), data(1.0, 1.0), torch.tensor([2, 1]), 0.2, 0.2)
    assert got.loss.tolist() == pytest.approx([-1.2, -math.exp(-0.1)])
    assert got.clipped.tolist() == [1, 0]
    assert slope(got.loss, logp) == pytest.approx([0, 0, -math.exp(-0.1)])
    whole = sequence_ppo_clip(logp, torch.zeros(3).double(), data(-1.0, 1.0), torch.tensor([2, 1]), 0.2, 0.2)
    assert whole.loss.tolist() == pytest.approx([math.exp(0.6), -math.exp(-0.1)])


def test_gspo_token_has_the_value_and_gradient_of_gspo() -> None:
    torch.manual_seed(0)
    lengths, tokens = torch.tensor([4, 1, 0, 6, 3]), 14
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0])
    logp = torch.randn(tokens).double().requires_grad_()
    old, advantages = (logp + 0.3 * torch.randn(tokens)).detach(), torch.randn(5).double()
    row = gspo(logp, old, advantages, lengths, 0.02, 0.03, mask=mask)
    spread = torch.repeat_interleave(advantages, lengths)
    token = gspo_token(logp, old, spread, lengths, 0.02, 0.03, mask=mask)
    counts = torch.tensor([3.0, 1, 1, 5, 1]).double()
    weights = torch.where(mask > 0, torch.repeat_interleave(1 / counts, lengths), 0.0)
    torch.testing.assert_close((token.loss * weights).sum(), row.loss.sum())
    assert slope(token.loss * weights, logp) == pytest.approx(slope(row.loss, logp), rel=1e-12, abs=1e-12)
    assert row.clipped.equal(token.clipped)
    assert 0 < row.clipped.sum() < 4


# --- value, preference, imitation, weights ---------------------------------------------------------------------------


def test_value_clip() -> None:
    values = leaf(1.0, 1.0, 0.1)
    got = value_clip(values, data(0, 0, 0), data(2, 0.5, 1), 0.2)
    assert got.loss.tolist() == pytest.approx([0.5 * 1.8**2, 0.5 * 0.5**2, 0.5 * 0.9**2])
    assert got.clipped.tolist() == [1, 0, 0]
    assert slope(got.loss, values) == pytest.approx([0, 0.5, -0.9])
    assert value_clip(values, data(0, 0, 0), data(2, 0.5, 1), None).loss.tolist() == pytest.approx([0.5, 0.125, 0.405])


def test_explained_variance() -> None:
    returns = data(1, 2, 3, 50)
    mask = torch.tensor([1, 1, 1, 0])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(data(9, 9, 9, 0), returns, mask) == 0
    assert explained_variance(data(3, 2, 1, 0), returns, mask) == pytest.approx(-3)
    assert math.isnan(explained_variance(returns, torch.ones(4)))


def test_dpo() -> None:
    chosen, rejected = leaf(-1.0, -2.0), leaf(-3.0, -2.0)
    got = dpo(chosen, rejected, data(-1.5, -2.0), data(-2.5, -2.0), beta=0.5)
    assert got.loss.tolist() == pytest.approx([math.log1p(math.exp(-0.5)), math.log(2)])
    assert got.chosen_reward.tolist() == pytest.approx([0.25, 0])
    assert got.rejected_reward.tolist() == pytest.approx([-0.25, 0])
    assert slope(got.loss, chosen)[1] == pytest.approx(-0.25)
    smooth = dpo(chosen, rejected, data(-1.5, -2.0), data(-2.5, -2.0), beta=0.5, label_smoothing=0.1)
    assert smooth.loss[0].item() == pytest.approx(math.log1p(math.exp(-0.5)) + 0.1 * 0.5)
    squared = ipo(chosen, rejected, data(-1.5, -2.0), data(-2.5, -2.0), beta=0.5)
    assert squared.loss.tolist() == pytest.approx([0, 1])


def test_pairs_from_groups() -> None:
    nan = float("nan")
    rewards = np.array([0.5, 1, 0, 1, 2, 2, nan, 3, nan])
    groups = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2])
    got = best_worst_pairs(rewards, groups)
    assert (got.chosen.tolist(), got.rejected.tolist(), got.skipped_groups) == ([1], [2], 2)
    order = np.array([3, 8, 1, 0, 5, 2, 4, 7, 6])
    moved = best_worst_pairs(rewards[order], groups[order], keys=order)
    assert order[moved.chosen].tolist() == [1]
    empty = best_worst_pairs(np.zeros(0), np.zeros(0, dtype=np.int64))
    assert empty.chosen.shape == (0,)


def test_best_of_n() -> None:
    rewards = np.array([1.0, 3, 3, float("nan"), 0, 0])
    groups = np.array([0, 0, 0, 0, 1, 1])
    assert np.flatnonzero(best_of_n(rewards, groups)).tolist() == [1, 4]
    assert np.flatnonzero(best_of_n(rewards, groups, keep=2, at_least=0.5)).tolist() == [1, 2]
    assert np.flatnonzero(best_of_n(rewards, groups, keys=-np.arange(6))).tolist() == [2, 5]
    with pytest.raises(ValueError, match="keep"):
        best_of_n(rewards, groups, keep=0)
    assert nll(data(-2.0)).tolist() == [2.0]


def test_weights() -> None:
    lengths, mask = torch.tensor([2, 0, 3]), torch.tensor([1, 0, 1, 1, 1])
    assert token_sum_weights(lengths, horizon=8, total_rows=3, mask=mask).tolist() == pytest.approx(
        [1 / 24, 0, 1 / 24, 1 / 24, 1 / 24]
    )
    assert row_weights(lengths, total_rows=2).tolist() == [0.5, 0, 0.5]
    assert not token_sum_weights(lengths, horizon=8, total_rows=0).any()
    with pytest.raises(ValueError, match="horizon"):
        token_sum_weights(lengths, horizon=0, total_rows=3)
