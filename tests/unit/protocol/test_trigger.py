"""K of N: exact counts and deadlines."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.protocol.batches import BatchSizes
from rlflow.protocol.trigger import Trigger


@pytest.mark.parametrize(
    ("percent", "batch", "group", "start"),
    [
        (75, 512, 1, 384),
        (75, 6, 1, 5),
        (50, 7, 1, 4),
        (100, 9, 1, 9),
        ("0.1", 1000, 1, 1),
        (0.1, 1001, 1, 2),
        (50, 24, 8, 16),
        (1, 64, 8, 8),
    ],
)
def test_counts_are_rounded_up_to_samples_and_groups(percent: int | str, batch: int, group: int, start: int) -> None:
    assert Trigger.percent(percent).start(batch, group) == start


@given(st.integers(1, 1000), st.integers(1, 50), st.integers(1, 20))
def test_the_count_is_the_least_that_is_enough(permille: int, groups: int, group: int) -> None:
    """70 % of 10 is 7 and not 8, which floats give for some shares."""
    share = Fraction(permille, 1000)
    start = Trigger(share).start(groups * group, group)
    assert start % group == 0
    assert start >= share * groups * group > start - group


def test_decimals_are_taken_as_written() -> None:
    assert Trigger.percent(0.1).share == Fraction(1, 1000)
    assert Trigger.percent("33.3").share == Fraction(333, 1000)
    assert Trigger.percent(Fraction(100, 3)).share == Fraction(1, 3)


@pytest.mark.parametrize("percent", [0, -1, 101, "100.0001"])
def test_shares_out_of_range(percent: int | str) -> None:
    with pytest.raises(ValueError, match="above 0 % and at most 100 %"):
        Trigger.percent(percent)


def test_floats_and_unknown_words_are_refused() -> None:
    with pytest.raises(TypeError):
        Trigger(0.75)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="partial"):
        Trigger(Fraction(1, 2), "drop")  # type: ignore[arg-type]


def test_the_same_batch_carries_nothing() -> None:
    early = Trigger(Fraction(1, 2), same_batch=True)
    assert not early.carries
    assert (early.start(8), early.least(8)) == (4, 8)
    assert early.deadline(3, 1, BatchSizes.constant(8)) == 4


@given(st.integers(0, 5), st.integers(0, 4), st.integers(1, 100), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_the_deadline_is_the_step_that_clears_the_window(
    version: int, bound: int, percent: int, batches: list[int]
) -> None:
    sizes = BatchSizes.constant(batches[0])
    for k, batch in enumerate(batches[1:], start=1):
        sizes = sizes.changed(batch, 3 * k)
    trigger = Trigger.percent(percent)
    left = sum(sizes.at(step) for step in range(version, version + bound + 1))
    step = version
    while True:
        left -= -(-sizes.at(step) * percent // 100)
        if left <= 0:
            break
        step += 1
    assert trigger.deadline(version, bound, sizes) == step
