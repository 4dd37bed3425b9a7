"""Prices of a bound, against the graph's cycle ratios and hand-worked numbers."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from rlflow.protocol.prices import best_burst, least_period, update_lag


def test_lag_of_several_updates() -> None:
    assert [update_lag(4, 0), update_lag(2, 1), update_lag(1, 3)] == [3, 3, 3]
    with pytest.raises(ValueError, match="at least 1"):
        update_lag(0, 1)


@pytest.mark.parametrize(
    ("longest", "train", "sync", "age", "burst", "waits", "period"),
    [
        (90, 8, 2, 0, 1, True, 100),
        (90, 8, 2, 1, 1, True, 50),
        (90, 8, 2, 1, 1, False, 50),
        (90, 8, 2, 4, 5, True, 20),  # burst bound + 1: as without
        (90, 10, 0, 4, 4, True, Fraction(130, 8)),  # burst = bound: (D + bound * T) / (2 bound)
        (90, 10, 0, 2, 2, True, Fraction(110, 4)),
        (5, 10, 0, 4, 1, True, 10),  # the trainer itself
    ],
)
def test_hand_worked(longest: int, train: int, sync: int, age: int, burst: int, waits: bool, period: Fraction) -> None:
    assert least_period(longest, train, sync, worst_age=age, burst=burst, waits_for_sync=waits) == period


def test_a_burst_of_one_and_of_bound_plus_one_cost_the_same() -> None:
    for longest, train, sync, bound in product((0, 7, 100), (1, 9), (0, 2), range(5)):
        for waits in (True, False):
            one, all_ = (
                least_period(longest, train, sync, worst_age=bound, burst=burst, waits_for_sync=waits)
                for burst in (1, bound + 1)
            )
            assert one == all_ == max(train + (sync if waits else 0), Fraction(longest + train + sync, bound + 1))


def test_the_best_burst_is_the_bound_where_generation_is_long() -> None:
    for bound in (2, 3, 4, 8):
        assert best_burst(1000, 10, 0, bound=bound) == bound
    assert best_burst(1, 10, 0, bound=4) == 1
    assert best_burst(1000, 10, 0, bound=0) == 1
