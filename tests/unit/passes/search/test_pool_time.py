"""T_P(n): against all joint choices, never increasing, and the smallest size for a time."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_oracles import LIMIT, Moves, options, pool_time, reshards, resident

from rlflow.passes.search.joint import resident as resident_swap
from rlflow.passes.search.options import StageOption, StageTable
from rlflow.passes.search.pool_time import Misfit, PoolTimes

SIZES = (1, 2, 4, 8, 16, 24)
STAGES = ("s0", "s1", "s2")
BLOCKS = [block for k in (1, 2, 3) for block in combinations(range(3), k)]

three = st.tuples(*(options(SIZES, most=5) for _ in STAGES))


def times_of(given_options: tuple[list[StageOption], ...], moves: Moves) -> PoolTimes:
    tables = [StageTable.of(some, LIMIT) for some in given_options]
    return PoolTimes(STAGES, tables, SIZES, resident_swap(LIMIT), lambda *key: moves[key])


@settings(max_examples=30, derandomize=True, deadline=None)
@given(three, reshards(STAGES))
def test_it_is_the_least_time_and_never_increases(given_options: tuple[list[StageOption], ...], moves: Moves) -> None:
    times = times_of(given_options, moves)
    for block in BLOCKS:
        seconds: list[float] = []
        for n in SIZES:
            plan = times.at_most(block, n)
            seconds.append(math.inf if plan is None else plan.seconds)
            assert seconds[-1] == pool_time(block, n, given_options, STAGES, moves, resident)
            assert (times.misfit(block, n) is None) == (plan is not None)
        assert seconds == sorted(seconds, reverse=True)
        assert all(-floor <= s for floor, s in zip(times.floor(block), seconds, strict=True))


@settings(max_examples=30, derandomize=True, deadline=None)
@given(three, reshards(STAGES), st.lists(st.tuples(st.sampled_from(BLOCKS), st.integers(-1, 40)), max_size=12))
def test_the_smallest_size_whatever_was_asked_before(
    given_options: tuple[list[StageOption], ...], moves: Moves, questions: list[tuple[tuple[int, ...], int]]
) -> None:
    times, fresh = times_of(given_options, moves), times_of(given_options, moves)
    for block, limit in questions:
        for low, high in ((1, None), (2, 16), (3, 3), (8, None)):
            sizes = [low] if low == high else [n for n in SIZES if low <= n and (high is None or n <= high)]
            every = {n: fresh.at_most(block, n) for n in sizes}
            expected = min((n for n, plan in every.items() if plan is not None and plan.seconds <= limit), default=None)
            found = times.least(block, float(limit), low, high)
            assert (None if found is None else found.devices) == expected
            floor = times.least_floor(block, float(limit), low, high)
            if found is not None:
                assert floor is not None
                assert floor.devices <= found.devices


def option(devices: int, seconds: float, static: int, peak: int, cls: str = "a") -> StageOption:
    return StageOption(devices, seconds, static, peak, (cls, devices), cls)


def test_other_options_for_one_stage_leave_the_rest_alone() -> None:
    tables = [StageTable.of([option(1, float(i + 1), 1, 1)], LIMIT) for i in range(3)]
    times = PoolTimes(STAGES, tables, SIZES, resident_swap(LIMIT))
    before = times.at_most((0, 2), 1)
    changed = times.with_table(1, StageTable.of([option(1, 10.0, 1, 1)], LIMIT))
    assert changed.at_most((0, 2), 1) is before
    both, old = changed.at_most((0, 1), 1), times.at_most((0, 1), 1)
    assert both is not None
    assert old is not None
    assert (both.seconds, old.seconds) == (11.0, 3.0)
    again = changed.with_table(1, tables[1]).at_most((0, 1), 1)
    assert again is not None
    assert again.seconds == 3.0


def test_a_misfit_names_the_stage_and_both_numbers() -> None:
    tables = [
        StageTable.of([option(2, 1.0, 9, 10)], LIMIT),
        StageTable.of([option(2, 1.0, 3, 14)], LIMIT),
        StageTable.of([option(2, 1.0, 0, 31), option(4, 1.0, 0, 25), option(8, 1.0, 0, 20)], LIMIT),
    ]
    times = PoolTimes(STAGES, tables, SIZES, resident_swap(LIMIT))
    assert times.misfit((0, 1), 2) == Misfit(("s0", "s1"), 2, "s1", 23, LIMIT)
    assert times.misfit((0, 1), 1) == Misfit(("s0", "s1"), 1, "s0", None, LIMIT)
    assert times.misfit((2,), 2) == Misfit(("s2",), 2, "s2", 31, LIMIT)
    assert times.misfit((2,), 4) == Misfit(("s2",), 4, "s2", 25, LIMIT)
    assert times.misfit((2,), 8) is None


@pytest.mark.parametrize("limit", [0.0, 2.9, 3.0])
def test_a_stage_that_does_not_run_on_this_type(limit: float) -> None:
    times = PoolTimes(("s0", "s1"), [StageTable.of([option(1, 3.0, 1, 1)], LIMIT), None], SIZES, resident_swap(LIMIT))
    assert (times.least((0,), limit) is not None) == (limit == 3.0)
    assert times.least((0, 1), math.inf) is None
    assert times.misfit((0, 1), 24) == Misfit(("s0", "s1"), 24, "s1", None, 0)
