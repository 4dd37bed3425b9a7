"""Closed forms of pipeline schedules against orders that are worked off pass by pass."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.cost.errors import CostError, LayoutError, UnknownFactError
from rlflow.cost.pipeline_orders import Work, interleaved, makespan, one_f_one_b, zero_bubble
from rlflow.cost.pipelines import SCHEDULES, bubble_seconds, check_schedule, in_flight, parameter_copies

quick = settings(max_examples=60, derandomize=True, deadline=None)
TIMES = st.floats(0.1, 10)


def peak(mine):
    """Micro-batch chunks whose activations a rank holds at most: from F to its last B or W."""
    last = "W" if any(work.kind == "W" for work in mine) else "B"
    held = most = 0
    for work in mine:
        held += (work.kind == "F") - (work.kind == last)
        most = max(most, held)
    return most


@given(st.integers(1, 8), st.integers(1, 24), TIMES, TIMES)
@quick
def test_1f1b(p, m, f, b):
    order = one_f_one_b(p, m)
    took = makespan(order, lambda kind, rank, chunk: {"F": f, "B": b, "W": 0.0}[kind])
    assert took == pytest.approx(m * (f + b) + bubble_seconds("1f1b", p, f, b))
    assert [peak(mine) for mine in order] == [in_flight("1f1b", p, m, stage=r) for r in range(p)]


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4), TIMES, TIMES)
@quick
def test_interleaved(p, groups, v, f, b):
    m = p * groups
    order = interleaved(p, m, v)
    took = makespan(order, lambda kind, rank, chunk: {"F": f / v, "B": b / v, "W": 0.0}[kind])
    assert took == pytest.approx(m * (f + b) + bubble_seconds("interleaved", p, f, b, v=v))
    assert [peak(mine) / v for mine in order] == [in_flight("interleaved", p, m, v=v, stage=r) for r in range(p)]


def test_interleaved_holds_what_the_paper_says():
    """p (1 + (p - 1)/(p v)) on the first rank."""
    assert in_flight("interleaved", 35, 280, v=3) == pytest.approx(35 * (1 + 34 / (35 * 3)))


@given(st.integers(1, 8), st.integers(0, 16))
@quick
def test_zero_bubble_of_equal_parts(p, extra):
    """F = B - W = W: ZB-H1 leaves a third of the bubble of 1F1B, ZB-H2 only the start of the pipeline."""
    m = 2 * p + extra
    h1, h2 = zero_bubble(p, m), zero_bubble(p, m, doubled=True)
    assert makespan(h1, lambda *_: 1.0) == pytest.approx(3 * m + bubble_seconds("zb1p", p, 1, 2, 1))
    assert bubble_seconds("zb1p", p, 1, 2, 1) == pytest.approx(bubble_seconds("1f1b", p, 1, 2) / 3)
    assert bubble_seconds("zb2p", p, 1, 2, 1) == 0
    assert makespan(h2, lambda *_: 1.0) == pytest.approx(3 * m + p - 1)
    assert max(peak(mine) for mine in h1) == p == in_flight("zb1p", p, m)
    assert max(peak(mine) for mine in h2) == 2 * p - 1 <= in_flight("zb2p", p, m)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=2, max_size=6), st.integers(1, 16))
@quick
def test_uneven_stages(stages, m):
    """1F1B of unequal stages: at least the work of every rank and the way through, at most m - 1 times the slowest more."""
    took = makespan(one_f_one_b(len(stages), m), lambda kind, rank, chunk: stages[rank][kind == "B"])
    through = sum(f + b for f, b in stages)
    slowest = max(f + b for f, b in stages)
    assert took >= max(through, m * slowest) - 1e-9
    one_by_one = m * through
    assert took <= one_by_one + 1e-9
    ceiling = (m + len(stages) - 1) * (max(f for f, _ in stages) + max(b for _, b in stages))
    assert took <= ceiling + 1e-9


@given(st.integers(1, 5), st.integers(1, 10), st.integers(2, 3))
@quick
def test_orders_do_everything_once(p, m, v):
    for order, chunks, kinds in (
        (one_f_one_b(p, m), 1, "FB"),
        (interleaved(p, m * p, v), v, "FB"),
        (zero_bubble(p, m), 1, "FBW"),
        (zero_bubble(p, m, doubled=True), 1, "FBW"),
    ):
        count = m * p if chunks > 1 else m
        everything = {Work(kind, i, c) for kind in kinds for i in range(count) for c in range(chunks)}
        assert all(len(mine) == len(everything) and set(mine) == everything for mine in order)
        makespan(order, lambda *_: 1.0)  # and ends


def test_transfers_lengthen_the_way_through():
    order = one_f_one_b(4, 1)
    assert makespan(order, lambda *_: 1.0, transfer=0.5) == pytest.approx(8 + 6 * 0.5)


def test_an_order_that_waits_for_itself():
    backwards = ((Work("B", 0), Work("F", 0)),)
    with pytest.raises(CostError, match="waits for itself at rank 0"):
        makespan(backwards, lambda *_: 1.0)


def test_dualpipe_by_hand():
    """(p/2 - 1)(F&B + B - 3W), F&B = F + B: 3 (3 + 2 - 3) at p = 8; two copies of the parameters, p + 1 in flight."""
    assert bubble_seconds("dualpipe", 8, 1, 2, 1) == 3 * (3 + 2 - 3)
    assert parameter_copies("dualpipe") == 2
    assert in_flight("dualpipe", 8, 32) == 9
    assert [in_flight(s, 6, 99) for s in ("zbv", "v-half", "v-min")] == [6, 3, 2]


def test_one_stage_has_no_bubble():
    assert [bubble_seconds(schedule, 1, 1, 2, 1) for schedule in SCHEDULES] == [0] * len(SCHEDULES)


def test_bubbles_that_are_not_published():
    with pytest.raises(UnknownFactError, match="v-half"):
        bubble_seconds("v-half", 4, 1, 2, 1)


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v"),
    [("interleaved", 4, 6, 2), ("dualpipe", 3, 8, 1), ("dualpipe", 4, 6, 1), ("1f1b", 4, 8, 2)],
)
def test_schedules_that_cannot_run(schedule, p, m, v):
    with pytest.raises(LayoutError):
        check_schedule(schedule, p, m, v)
