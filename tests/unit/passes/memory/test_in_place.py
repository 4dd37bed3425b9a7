"""Objects that are written over others: gone with the phase that does it, the copy on the host, and never too much."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.passes.analysis.memory.choice import Infeasible
from rlflow.passes.analysis.memory.gaps import gaps_of
from rlflow.passes.analysis.memory.movement import Action
from rlflow.passes.analysis.memory.objects import Device, Kind, Period, Phase, Resident
from rlflow.passes.analysis.memory.swap import SwapPlan, plan_swaps

PERIOD = Period(
    tuple(
        Phase(name, Fraction(seconds), overlap=name != "write")
        for name, seconds in (("write", 2), ("sample", 20), ("score", 5), ("train", 10))
    )
)


def weights(trained: int, read: int) -> list[Resident]:
    return [
        Resident(
            "trained",
            "m",
            trained,
            frozenset({"write", "train"}),
            Kind.DIRTY,
            page_bytes=2,
            overwritten_in="write",
        ),
        Resident("read", "m", read, frozenset({"sample"}), Kind.DROPPABLE, page_bytes=2, written_in="write"),
        Resident("room", "m", max(0, read - trained), frozenset({"write"}), Kind.DROPPABLE, page_bytes=2),
    ]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Resident], Device]:
    found = weights(draw(st.integers(1, 12)), draw(st.integers(1, 12)))
    for number in range(draw(st.integers(0, 3))):
        needed = draw(st.sets(st.sampled_from([p.name for p in PERIOD.phases]), min_size=1))
        kind = draw(st.sampled_from(list(Kind)))
        found.append(Resident(f"other {number}", "o", draw(st.integers(1, 9)), frozenset(needed), kind, page_bytes=2))
    device = Device(draw(st.integers(4, 40)), draw(st.sampled_from([12, 1000])), 3, 2)
    return [resident for resident in found if resident.bytes], device


@settings(max_examples=200, deadline=None)
@given(cases())
def test_what_is_overwritten_is_gone_and_on_the_host(case: tuple[list[Resident], Device]) -> None:
    residents, device = case
    plan = plan_swaps(residents, PERIOD, device)
    sizes = {resident.name: resident.bytes for resident in residents}
    if isinstance(plan, Infeasible):
        if plan.resource == "device":
            assert plan.needed_bytes > device.hbm_bytes
        return
    assert all(sample.device_bytes <= device.hbm_bytes for sample in plan.timeline.samples)
    assert all(sample.host_bytes <= device.host_bytes for sample in plan.timeline.samples)
    writing, sampling = (dict(plan.timeline.phase(name).peak.contents) for name in ("write", "sample"))
    assert writing["trained"] == sizes["trained"]
    assert "read" not in writing
    assert sampling["read"] == sizes["read"]
    assert plan.timeline.phase("write").host_bytes >= sizes["trained"]
    mine = {(i.resident, i.action): i for i in plan.instructions}
    lost, there = mine["trained", Action.DROP], mine["read", Action.REBUILD]
    assert lost.bytes == sizes["trained"]
    assert lost.by_phase
    assert there.by_phase
    assert lost.boundary == there.boundary == "sample"
    assert lost.end == there.start, "the one takes the memory of the other at that moment"
    assert mine["trained", Action.ONLOAD].bytes == sizes["trained"]
    assert ("trained", Action.OFFLOAD) not in mine, "the phase itself copies it"


def test_the_peak_is_the_larger_layout() -> None:
    for trained, read in ((4, 10), (10, 4)):
        beside = [
            Resident("trained", "m", trained, frozenset({"write", "train"}), Kind.DIRTY, page_bytes=2),
            Resident("read", "m", read, frozenset({"write", "sample"}), Kind.DROPPABLE, page_bytes=2),
        ]
        assert isinstance(plan_swaps(beside, PERIOD, Device(13, 100, 1, 1)), Infeasible)
        plan = plan_swaps(weights(trained, read), PERIOD, Device(10, 100, 1, 1))
        assert isinstance(plan, SwapPlan)
        assert plan.peak_bytes == 10


def test_a_host_without_room_for_the_copy_is_said_so() -> None:
    found = plan_swaps(weights(4, 10), PERIOD, Device(100, 3, 1, 1))
    assert isinstance(found, Infeasible)
    assert (found.resource, found.needed_bytes, found.capacity_bytes) == ("host", 4, 3)


def test_only_what_is_written_leaves_without_a_copy() -> None:
    trained, read, _ = weights(4, 10)
    (gap,) = gaps_of(trained, PERIOD)
    assert (gap.phases, gap.forced, gap.saves, gap.returns) == ((1, 2), True, False, True)
    assert gap.host_phases(PERIOD) == {0, 1, 2}
    (gap,) = gaps_of(read, PERIOD)
    assert (gap.phases, gap.forced, gap.rebuilds) == ((2, 3, 0), True, True)


@pytest.mark.parametrize(
    "wrong",
    [
        Resident("x", "o", 1, frozenset({"write"}), Kind.CLEAN, overwritten_in="write"),
        Resident("x", "o", 1, frozenset({"train"}), Kind.DIRTY, overwritten_in="write"),
        Resident("x", "o", 1, frozenset({"write"}), Kind.DROPPABLE, written_in="write"),
        Resident("x", "o", 1, frozenset({"sample"}), Kind.DIRTY, written_in="write"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: Resident) -> None:
    with pytest.raises(ValueError, match="x: only a d"):
        plan_swaps([wrong], PERIOD, Device(10, 10, 1, 1))
