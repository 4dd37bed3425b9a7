"""Waking an engine: the peak depends on the order of operations."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.passes.analysis.memory.wake import (
    WakeMisordered,
    WakeOp,
    WakeOrder,
    WakeOverflow,
    best_order,
    check_order,
    engine_wake,
)

OPS = engine_wake(gathered_bytes=15, engine_bytes=15, kv_bytes=48)
HELD = 15 + 4  # the gathered weights, and 4 of others
STAGED = ("wake weights", "load weights", "free gathered", "wake kv")
ALL_FIRST = ("wake weights", "wake kv", "load weights", "free gathered")


def test_waking_all_before_loading_takes_82_of_80() -> None:
    found = check_order(OPS, ALL_FIRST, HELD, 80)
    assert isinstance(found, WakeOverflow)
    assert (found.op, found.bytes, found.missing_bytes) == ("wake kv", 82, 2)
    assert found.order.peak_bytes == 82


def test_the_staged_order_takes_67_and_is_the_one_found() -> None:
    found = check_order(OPS, STAGED, HELD, 80)
    assert isinstance(found, WakeOrder)
    assert [step.bytes_after for step in found.steps] == [34, 34, 19, 67]
    best = best_order(OPS, HELD)
    assert best.names == STAGED
    assert best.peak_bytes == 67
    assert best == found


def test_loading_needs_the_weights_first() -> None:
    order = ("load weights", "wake weights", "free gathered", "wake kv")
    assert check_order(OPS, order, HELD, 80) == WakeMisordered("load weights", ("wake weights",))


def test_what_is_held_counts_from_the_start() -> None:
    found = check_order([WakeOp("free", releases=5)], ["free"], 9, 8)
    assert isinstance(found, WakeOverflow)
    assert (found.bytes, found.missing_bytes) == (9, 1)
    assert check_order([], [], 3, 3) == WakeOrder((), 3)


@st.composite
def operations(draw: st.DrawFn) -> tuple[list[WakeOp], int]:
    ops: list[WakeOp] = []
    for i in range(draw(st.integers(0, 6))):
        after = tuple(op.name for op in ops if draw(st.integers(0, 3)) == 0)
        ops.append(WakeOp(f"o{i}", *(draw(st.integers(0, 9)) for _ in range(3)), after=after))
    shuffled = draw(st.permutations(ops))
    return shuffled, sum(op.releases for op in ops) + draw(st.integers(0, 5))


@settings(max_examples=80, deadline=None)
@given(operations())
def test_the_order_found_has_the_least_peak_of_all_orders(case: tuple[list[WakeOp], int]) -> None:
    ops, held = case
    peaks = []
    for order in permutations(ops):
        done: set[str] = set()
        at, peak = held, held
        for op in order:
            if not done.issuperset(op.after):
                break
            peak = max(peak, at + op.allocates + op.scratch_bytes)
            at += op.allocates - op.releases
            done.add(op.name)
        else:
            peaks.append(peak)
    best = best_order(ops, held)
    assert best.peak_bytes == min(peaks)
    assert check_order(ops, best.names, held, best.peak_bytes) == best
    assert isinstance(check_order(ops, best.names, held, best.peak_bytes - 1), WakeOverflow)


def test_ties_keep_the_given_order() -> None:
    ops = [WakeOp(name, allocates=1) for name in "cab"]
    assert best_order(ops, 0).names == ("c", "a", "b")


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([WakeOp("a", after=("b",)), WakeOp("b", after=("a",))], "circle"),
        ([WakeOp("a", after=("x",))], "unknown operations: x"),
        ([WakeOp("a"), WakeOp("a")], "different names"),
        ([WakeOp("a", releases=3)], "releases more"),
        ([WakeOp("a", allocates=-1)], "not negative"),
        ([WakeOp(str(i)) for i in range(21)], "at most 20"),
    ],
)
def test_what_cannot_be_ordered(ops: list[WakeOp], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        best_order(ops, 0)


def test_an_order_names_every_operation_once() -> None:
    with pytest.raises(ValueError, match="exactly once"):
        check_order(OPS, STAGED[:3], HELD, 80)
