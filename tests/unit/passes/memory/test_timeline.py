"""Bytes at every instant, worked by hand; and the share of a device that they leave for an engine."""

from __future__ import annotations

from fractions import Fraction

import pytest

from rlflow.amounts import GIB
from rlflow.passes.analysis.memory.fraction import memory_fraction, peak_of_others
from rlflow.passes.analysis.memory.movement import Movement, Slot
from rlflow.passes.analysis.memory.objects import Device, Kind, Period, Phase, Resident, exact_seconds
from rlflow.passes.analysis.memory.swap import SwapPlan, plan_swaps
from rlflow.passes.analysis.memory.timeline import build_timeline

TWO = Period((Phase("a", Fraction(4)), Phase("b", Fraction(10))))


def made(name: str, size: int, needed: str, kind: Kind = Kind.DIRTY, page: int = 1) -> Resident:
    return Resident(name, "role", size, frozenset(needed.split()), kind, page_bytes=page)


def planned(residents: list[Resident], period: Period, device: Device, *, whole: bool = False) -> SwapPlan:
    plan = plan_swaps(residents, period, device, whole=whole)
    assert isinstance(plan, SwapPlan), plan
    return plan


def test_a_page_counts_until_its_copy_out_ends_and_from_the_start_of_its_copy_in() -> None:
    """x (2 pages of 2 bytes, 1 byte/s both ways) is needed in a; y (5 bytes, dropped in a) in b; the device has 7.
    Before b, x must lose a page: 2 s out. Its copy back needs room that b does not have: 2 s before the next a."""
    residents = [made("x", 4, "a", page=2), made("y", 5, "b", Kind.DROPPABLE)]
    plan = planned(residents, TWO, Device(7, 9, 1, 1))
    assert [(s.at, s.device_bytes, s.host_bytes) for s in plan.timeline.samples] == [
        (0, 4, 0),  # a: x
        (4, 4, 2),  # the copy out starts: the host holds a buffer, the device still all of x
        (6, 7, 2),  # it has left; y is there again
        (16, 4, 2),  # y is dropped, the copy in starts
        (18, 4, 0),  # x is whole, the buffer is free
    ]
    assert plan.timeline.table() == [
        ("a", 0.0, 4.0, 4, 0),
        ("before b", 4.0, 6.0, 7, 2),
        ("b", 6.0, 16.0, 7, 2),
        ("before a", 16.0, 18.0, 7, 2),
    ]
    assert plan.exposed_seconds == 4
    assert plan.timeline.peak.contents == (("y", 5), ("x", 2))
    assert plan.timeline.phase("a").peak.contents == (("x", 4),)
    with pytest.raises(KeyError):
        plan.timeline.phase("c")


def test_with_one_flag_per_object_memory_is_free_only_when_all_of_it_has_left() -> None:
    residents = [made("x", 4, "a", page=2), made("y", 5, "b", Kind.DROPPABLE)]
    plan = planned(residents, TWO, Device(7, 9, 1, 1), whole=True)
    before = [s for s in plan.timeline.samples if 4 <= s.at < 8]
    assert [(s.at, s.device_bytes, s.host_bytes) for s in before] == [(4, 4, 4)]
    assert plan.exposed_seconds == 8  # b has 2 bytes to spare, too few for x: 4 s out and 4 s back


def test_without_moves_everything_is_resident_all_the_time() -> None:
    residents = [made("x", 4, "a"), made("y", 5, "b")]
    slots = (Slot(1, Fraction(0), Fraction(4)), Slot(2, Fraction(4), Fraction(4)), Slot(3, Fraction(4), Fraction(14)))
    timeline = build_timeline(residents, (), Movement((), slots), TWO)
    assert [(s.at, s.device_bytes, s.host_bytes) for s in timeline.samples] == [(0, 9, 0)]
    assert [stretch.peak.bytes for stretch in timeline.stretches] == [9, 9, 9]


def test_a_phase_of_no_length_has_a_peak_of_its_own() -> None:
    blink = Period((Phase("a", Fraction(1)), Phase("blink", Fraction(0)), Phase("c", Fraction(1))))
    residents = [made("x", 3, "a c", Kind.DROPPABLE), made("y", 7, "blink", Kind.DROPPABLE)]
    plan = planned(residents, blink, Device(7, 0, 1, 1))
    assert [plan.timeline.phase(name).peak.bytes for name in ("a", "blink", "c")] == [3, 7, 3]
    assert plan.timeline.peak.where == "blink"


# --- the memory fraction of an engine --------------------------------------------------------------------------------

ENGINE = frozenset({"engine", "kv"})
STEP = Period((Phase("rollout", Fraction(100)), Phase("train", Fraction(100))))


def gib(name: str, size: int, needed: str, kind: Kind) -> Resident:
    return made(name, size * GIB, needed, kind, page=GIB)


def test_an_engine_that_never_sleeps_gets_what_the_peak_of_training_leaves() -> None:
    residents = [
        gib("engine", 8, "rollout train", Kind.DIRTY),
        gib("kv", 4, "rollout train", Kind.DROPPABLE),
        gib("weights", 16, "train", Kind.DIRTY),
        gib("optimizer", 24, "train", Kind.DIRTY),
    ]
    plan = planned(residents, STEP, Device(64 * GIB, 0, GIB, GIB))
    peak = peak_of_others(plan, residents, STEP, ENGINE)
    assert peak == 40 * GIB
    assert memory_fraction(64 * GIB, peak) == Fraction(375, 1000)  # (64 - 40) / 64, not 0.9


def test_an_engine_that_sleeps_gets_what_stays_during_the_rollout() -> None:
    residents = [
        gib("engine", 8, "rollout", Kind.DROPPABLE),
        gib("kv", 40, "rollout", Kind.DROPPABLE),
        gib("weights", 16, "train", Kind.DIRTY),
        gib("optimizer", 44, "train", Kind.DIRTY),
    ]
    plan = planned(residents, STEP, Device(64 * GIB, 200 * GIB, GIB, GIB))
    peak = peak_of_others(plan, residents, STEP, ENGINE)
    assert peak == 16 * GIB
    assert memory_fraction(64 * GIB, peak) == Fraction(750, 1000)
    assert peak_of_others(plan, residents, STEP, frozenset()) == 0


def test_fractions_are_rounded_down_and_never_negative() -> None:
    assert memory_fraction(3, 1) == Fraction(666, 1000)
    assert memory_fraction(10, 11) == 0
    with pytest.raises(ValueError, match="at least 1 byte"):
        memory_fraction(0, 0)


def test_seconds_are_exact_to_the_nanosecond() -> None:
    assert exact_seconds(0.1) == Fraction(1, 10)
    assert exact_seconds(3) == 3
