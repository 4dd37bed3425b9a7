"""Packing and dealing against brute force on small cases and bounds."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.cost.errors import WorkloadError
from rlflow.cost.lengths import Fixed, Lognormal
from rlflow.cost.microbatch import (
    deal,
    imbalance,
    mean_sequence,
    mean_square,
    microbatches,
    pack,
    rank_imbalance,
    representative,
)

quick = settings(max_examples=60, derandomize=True, deadline=None)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(10, 60))
@quick
def test_packing_holds_everything_within_budget(lengths, budget):
    bins = pack(lengths, budget)
    assert sorted(i for each in bins for i in each) == list(range(len(lengths)))
    for each in bins:
        assert sum(lengths[i] for i in each) <= budget or len(each) == 1
    long = [x for x in lengths if x > budget]
    short = [x for x in lengths if x <= budget]
    assert len(bins) <= len(long) + 11 / 9 * (-(-sum(short) // budget) * 2) + 1
    assert len(bins) >= len(long) + -(-sum(short) // budget) * (sum(short) > 0)


def test_packing_by_hand():
    assert pack([7, 2, 5, 3, 3], 10) == [[0, 3], [2, 4, 1]]
    assert pack([30, 4], 10) == [[0], [1]]
    with pytest.raises(WorkloadError):
        pack([1], 0)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
@quick
def test_dealing_is_within_four_thirds_of_the_best(costs, ranks):
    dealt = deal(costs, ranks)
    assert sorted(i for each in dealt for i in each) == list(range(len(costs)))
    most = max(sum(costs[i] for i in each) for each in dealt)
    best = min(
        max(sum(cost for cost, to in zip(costs, owner, strict=True) if to == rank) for rank in range(ranks))
        for owner in product(range(ranks), repeat=len(costs))
    )
    assert best <= most <= 4 / 3 * best
    assert imbalance(costs, ranks) == pytest.approx(most * ranks / sum(costs))


def test_balance_of_equal_rows():
    assert imbalance([1.0] * 8, 4) == 1
    assert imbalance([1.0] * 9, 4) == pytest.approx(3 / (9 / 4))
    assert imbalance([], 4) == 1
    with pytest.raises(WorkloadError):
        deal([1.0], 0)


def test_moments_of_sequences():
    prompt, response = Fixed(100), Lognormal.of_mean(1000, 8000)
    assert mean_sequence(prompt, response) == pytest.approx(1100)
    values = representative(prompt, response, 2000)
    assert sum(values) / 2000 == pytest.approx(1100)
    assert mean_square(prompt, response) == pytest.approx(sum(x * x for x in values) / 2000, rel=0.02)


@pytest.mark.parametrize(
    ("rows", "budget", "expected"),
    [(8, 4096, 4), (8, 2048, 8), (8, 1000, 8), (8, 10**6, 1), (7, 4096, 4), (0, 4096, 1)],
)
def test_microbatches_of_equal_sequences(rows, budget, expected):
    assert microbatches(Fixed(0), Fixed(2048), rows, budget) == expected


@given(st.integers(1, 300), st.sampled_from([2000, 4096, 16384, 65536, 10**6]))
@quick
def test_microbatches_are_within_bounds(rows, budget):
    prompt, response = Fixed(80.0), Lognormal.of_mean(1500, 4000)
    count = microbatches(prompt, response, rows, budget)
    if budget >= 4080:  # a longer sequence has a micro-batch of its own, beyond the budget
        assert count >= rows * mean_sequence(prompt, response) / budget - 1e-9
    assert count <= rows
    assert microbatches(prompt, response, rows, 2 * budget) <= count


def test_large_batches_are_represented():
    prompt, response = Fixed(80.0), Lognormal.of_mean(1500, 4000)
    assert microbatches(prompt, response, 40960, 16384) == pytest.approx(
        10 * microbatches(prompt, response, 4096, 16384), rel=0.01
    )


def test_few_long_rows_a_rank_are_unbalanced():
    prompt, response = Fixed(80.0), Lognormal.of_mean(3000, 30000, 1.0)
    few, many = (rank_imbalance(prompt, response, rows, 64, 1e-5) for rows in (64, 4096))
    assert 1 <= many < 1.05 < few
    assert rank_imbalance(prompt, response, 64, 1, 0.0) == 1
    assert rank_imbalance(prompt, response, 65536, 64, 0.0) < 1.01
