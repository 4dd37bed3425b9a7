"""Length penalties and rewards on tokens. Ids in brackets are those of the field reports."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.algorithms.gae import discounted_returns
from rlflow.backends.ray_runtime.algorithms.shaping import (
    overlong_filter,
    reward_with_sequence_kl,
    score_at_end,
    soft_overlong_penalty,
    with_kl_penalty,
)


def test_soft_overlong_penalty() -> None:
    got = soft_overlong_penalty(np.array([10, 80, 85, 90, 100, 101, 500]), limit=100, buffer=20)
    np.testing.assert_allclose(got, [0, 0, -0.25, -0.5, -1, -1, -1])
    np.testing.assert_allclose(soft_overlong_penalty(np.array([100, 101]), limit=100, buffer=0, scale=2.0), [0, -2])
    with pytest.raises(ValueError, match="buffer"):
        soft_overlong_penalty(np.array([1]), limit=10, buffer=11)


def test_overlong_filter() -> None:
    assert overlong_filter(np.array([True, False])).tolist() == [False, True]


def test_the_score_lies_on_the_last_token() -> None:  # J3
    got = score_at_end(torch.tensor([5.0, 7.0]), torch.tensor([3, 2]))
    assert got.tolist() == [0, 0, 5, 0, 7]


def test_the_score_lies_on_the_last_counted_token() -> None:
    mask = torch.tensor([1, 1, 0, 0, 0, 1])
    got = score_at_end(torch.tensor([5.0, 7.0, 8.0, 9.0]), torch.tensor([3, 2, 0, 1]), mask)
    assert got.tolist() == [0, 5, 0, 0, 0, 9]
    assert score_at_end(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_kl_of_masked_tokens_does_not_reach_earlier_returns() -> None:  # I5
    mask, lengths = torch.tensor([1, 0, 0, 1]), torch.tensor([4])
    for hidden in (1.0, float("nan")):
        kl = torch.tensor([1.0, hidden, hidden, 1.0])
        shaped = with_kl_penalty(torch.zeros(4), kl, coefficient=1.0, mask=mask)
        assert shaped.tolist() == [-1, 0, 0, -1]
        returns = discounted_returns(shaped, lengths, gamma=0.9, mask=mask)
        assert returns[0].item() == pytest.approx(-1.729, abs=1e-6)
    assert reward_with_sequence_kl(torch.tensor([1.0]), kl, lengths, coefficient=0.25, mask=mask).tolist() == [0.5]
