"""Metrics. Ids in brackets are those of the field reports the numbers come from."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from rlflow.backends.ray_runtime.algorithms.statistics import (
    approx_kl,
    mean_pass_at_k,
    pass_at_k,
    sequence_share,
    token_share,
)


def test_pass_at_k() -> None:  # O4
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert pass_at_k(4, 0, 4) == 0
    assert mean_pass_at_k([(4, 1), (4, 4)], 2) == 0.75
    assert math.isnan(mean_pass_at_k([], 1))
    with pytest.raises(ValueError, match="pass@5"):
        pass_at_k(4, 1, 5)


@pytest.mark.parametrize(("n", "c"), [(6, 0), (6, 2), (7, 5)])
def test_pass_at_k_counts_subsets(n: int, c: int) -> None:
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(range(n), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(min(s) < c for s in subsets) / len(subsets))


def test_shares_per_token_and_per_sequence_differ() -> None:  # G6
    flags, lengths = torch.tensor([1.0, 0, 0, 0, 1, 0]), torch.tensor([4, 2])
    mask = torch.tensor([1, 1, 1, 1, 0, 1])
    assert token_share(flags, total_tokens=6) == pytest.approx(1 / 3)
    assert sequence_share(flags, lengths, total_rows=2) == 1
    assert token_share(flags, total_tokens=5, mask=mask) == pytest.approx(0.2)
    assert sequence_share(flags, lengths, total_rows=2, mask=mask) == 0.5
    parts = [token_share(flags[:4], total_tokens=6), token_share(flags[4:], total_tokens=6)]
    assert sum(parts) == pytest.approx(1 / 3)
    assert token_share(flags, total_tokens=0) == sequence_share(flags, lengths, total_rows=0) == 0


def test_approximate_kl() -> None:
    torch.manual_seed(0)
    old, new = (torch.log_softmax(torch.randn(9).double(), -1) for _ in range(2))
    exact = float((old.exp() * (old - new)).sum())
    for estimator in ("k1", "k3"):
        assert float((old.exp() * approx_kl(new, old, estimator)).sum()) == pytest.approx(exact)
    assert (approx_kl(new, old) >= 0).all()
