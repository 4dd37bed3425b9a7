"""Swap plans against exhaustive search and a replay, on problems small enough for both."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.amounts import GIB
from rlflow.passes.analysis.memory.choice import Infeasible, cost
from rlflow.passes.analysis.memory.movement import Action
from rlflow.passes.analysis.memory.objects import Device, Kind, Period, Phase, Resident
from rlflow.passes.analysis.memory.swap import SwapPlan, least_peak, plan_swaps


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rlflow_memory_oracle", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


oracle: Any = _load(Path(__file__).parent / "oracle.py")


def period(*phases: tuple[str, float], cyclic: bool = True) -> Period:
    return Period(tuple(Phase(name, Fraction(seconds)) for name, seconds in phases), cyclic)


def made(name: str, size: int, needed: str, kind: Kind, page: int = 1, **settings: Any) -> Resident:
    return Resident(name, "role", size, frozenset(needed.split()), kind, page_bytes=page, **settings)


def planned(*arguments: Any, **settings: Any) -> SwapPlan:
    plan = plan_swaps(*arguments, **settings)
    assert isinstance(plan, SwapPlan), plan
    return plan


# --- against exhaustive search ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cyclic", [True, False])
@settings(max_examples=70, deadline=None)
@given(data=st.data(), whole=st.booleans())
def test_plans_are_optimal_and_refused_only_where_none_exists(data: st.DataObject, whole: bool, cyclic: bool) -> None:
    residents, periods, device = data.draw(oracle.cases(cyclic=cyclic))
    pages = [resident.whole() for resident in residents] if whole else residents
    best = oracle.cheapest(pages, periods, device)
    plan = plan_swaps(residents, periods, device, whole=whole)
    if isinstance(plan, Infeasible):
        assert best is None
        return
    assert best is not None
    assert plan.busy_seconds == cost(plan.evictions, device) == best
    assert plan.bounds.busy_seconds <= float(best) + 1e-9


def test_what_begins_on_the_host_is_copied_in_although_there_is_room() -> None:
    """On a line: it then leaves without a copy, which a page that had been on the device all the time could not."""
    first, last = made("first", 1, "p1 p2", Kind.CLEAN), made("last", 6, "p3", Kind.CLEAN, page=2)
    periods = Period(tuple(Phase(f"p{i}", Fraction(0), overlap=False) for i in range(4)), cyclic=False)
    device = Device(6, 1000, 1, 2)
    plan = planned([first, last], periods, device)
    assert plan.busy_seconds == cost(plan.evictions, device) == oracle.cheapest([first, last], periods, device)
    assert [(i.action, i.resident) for i in plan.instructions if i.resident == "first"] == [
        (Action.ONLOAD, "first"),
        (Action.DROP, "first"),
    ]


@settings(max_examples=120, deadline=None)
@given(case=oracle.cases(), whole=st.booleans())
def test_a_replay_of_the_moves_never_exceeds_device_host_or_link(case: Any, whole: bool) -> None:
    residents, periods, device = case
    plan = plan_swaps(residents, periods, device, whole=whole)
    if isinstance(plan, SwapPlan):
        pages = [resident.whole() for resident in residents] if whole else residents
        oracle.replay(plan, pages, periods, device)
        oracle.replay_at_boundaries(plan, pages, periods, device)
        assert plan.timeline.peak.bytes <= device.hbm_bytes
        assert plan.timeline.host_peak <= device.host_bytes
        assert plan.exposed_seconds >= plan.bounds.exposed_seconds
        assert plan.offload_bytes >= plan.bounds.offload_bytes
        assert plan.onload_bytes >= plan.bounds.onload_bytes


@settings(max_examples=50, deadline=None)
@given(case=oracle.cases(), more=st.integers(1, 5))
def test_more_memory_never_costs_more(case: Any, more: int) -> None:
    residents, periods, device = case
    plan = plan_swaps(residents, periods, device)
    larger = plan_swaps(residents, periods, replace(device, hbm_bytes=device.hbm_bytes + more))
    roomier = plan_swaps(residents, periods, replace(device, host_bytes=device.host_bytes + more))
    if isinstance(plan, SwapPlan):
        assert isinstance(larger, SwapPlan)
        assert isinstance(roomier, SwapPlan)
        assert larger.busy_seconds <= plan.busy_seconds
        assert roomier.busy_seconds <= plan.busy_seconds


@settings(max_examples=60, deadline=None)
@given(case=oracle.cases())
def test_missing_bytes_are_exactly_what_is_missing(case: Any) -> None:
    residents, periods, device = case
    found = plan_swaps(residents, periods, device)
    if isinstance(found, Infeasible):
        assert found.missing_bytes > 0
        assert found.needed_bytes == found.capacity_bytes + found.missing_bytes
        field = "hbm_bytes" if found.resource == "device" else "host_bytes"
        enough = replace(device, **{field: getattr(device, field) + found.missing_bytes})
        after = plan_swaps(residents, periods, enough)
        assert isinstance(after, SwapPlan) or after.resource != found.resource
        if found.resource == "host":  # one byte less is still too little
            almost = replace(device, host_bytes=device.host_bytes + found.missing_bytes - 1)
            assert isinstance(plan_swaps(residents, periods, almost), Infeasible)


# --- cases worked by hand --------------------------------------------------------------------------------------------

THREE = period(("a", 9), ("b", 9), ("c", 9))
ROUND = [made(name, 2, name[-1], Kind.CLEAN, host_copy=True) for name in ("at_a", "at_b", "at_c")]


def test_three_gaps_that_wrap_cost_one_and_a_half_objects_in_pages_and_two_whole() -> None:
    """Three phases, three gaps of two phases each: the matrix has determinant 2."""
    device = Device(4, 100, 2, 2)  # one whole object takes a second; 6 bytes do not fit into 4
    assert planned(ROUND, THREE, device).busy_seconds == Fraction(3, 2)
    assert planned(ROUND, THREE, device, whole=True).busy_seconds == 2
    assert planned(ROUND, THREE, device, whole=True).bounds.busy_seconds == pytest.approx(1.5)


def test_on_a_line_the_same_three_objects_cost_one() -> None:
    """`at_a` leaves for good after a, `at_c` was never there before c; `at_b` alone has gaps at both ends."""
    line = Period(THREE.phases, cyclic=False)
    plan = planned(ROUND, line, Device(4, 100, 2, 2))
    assert plan.busy_seconds == oracle.cheapest(ROUND, line, Device(4, 100, 2, 2))
    assert plan.busy_seconds == 1


OPTIMIZER = period(("forward_backward", 10), ("step", 1))


def in_gib(size: int, needed: str, kind: Kind, name: str) -> Resident:
    return made(name, size * GIB, needed, kind, page=GIB)


TRAINING = [
    in_gib(10, "forward_backward step", Kind.DIRTY, "weights"),
    in_gib(10, "forward_backward step", Kind.DROPPABLE, "gradients"),
    in_gib(20, "forward_backward", Kind.DROPPABLE, "activations"),
    in_gib(40, "step", Kind.DIRTY, "optimizer"),
]


def test_the_optimizer_on_the_device_only_around_the_step_takes_60_instead_of_80() -> None:
    device = Device(64 * GIB, 200 * GIB, 20 * GIB, 20 * GIB)
    plan = planned(TRAINING, OPTIMIZER, device, whole=True)
    assert [(a.name, a.peak_bytes // GIB, a.fits) for a in plan.alternatives] == [
        ("resident", 80, False),
        ("planned", 60, True),
        ("least", 60, True),
    ]
    assert plan.peak_bytes == 60 * GIB
    assert dict(plan.timeline.peak.contents)["optimizer"] == 40 * GIB
    assert plan.moved(Kind.DIRTY) == ("optimizer",)
    assert plan.moved(Kind.DROPPABLE) == ("activations",)
    by_action = {(i.action, i.resident): i for i in plan.instructions}
    assert by_action[Action.OFFLOAD, "optimizer"].boundary == "forward_backward"
    assert by_action[Action.ONLOAD, "optimizer"].boundary == "step"
    assert (plan.offload_bytes, plan.onload_bytes) == (40 * GIB, 40 * GIB)


def test_in_pages_only_what_overflows_moves() -> None:
    plan = planned(TRAINING, OPTIMIZER, Device(64 * GIB, 200 * GIB, 20 * GIB, 20 * GIB))
    assert plan.offload_bytes == 16 * GIB
    assert plan.peak_bytes == 64 * GIB


def test_nothing_moves_where_everything_fits() -> None:
    plan = planned(TRAINING, OPTIMIZER, Device(80 * GIB, 0, 1, 1))
    assert plan.instructions == ()
    assert plan.exposed_seconds == 0
    assert plan.peak_bytes == 80 * GIB


def test_the_tightest_phase_is_named_with_what_it_needs_at_once() -> None:
    found = plan_swaps(TRAINING, OPTIMIZER, Device(50 * GIB, 200 * GIB, 1, 1))
    assert found == Infeasible(
        "device",
        "step",
        10 * GIB,
        50 * GIB,
        (("optimizer", 40 * GIB), ("gradients", 10 * GIB), ("weights", 10 * GIB)),
    )
    assert least_peak(TRAINING, OPTIMIZER) == 60 * GIB


def test_copies_hide_behind_phases_that_have_room_and_wait_where_there_is_none() -> None:
    """x (4 bytes) is needed in a; y fills the device in b; c has room. At 1 byte/s nothing hides beside b, but the
    4 s back hide beside the 10 s of c. Out: 4 s before b."""
    steps = period(("a", 5), ("b", 5), ("c", 10))
    residents = [made("x", 4, "a", Kind.DIRTY), made("y", 4, "b", Kind.CLEAN, host_copy=True)]
    plan = planned(residents, steps, Device(4, 100, 1, 4))
    got = {(i.action, i.resident): i for i in plan.instructions}
    assert got[Action.OFFLOAD, "x"].exposed_seconds == 4
    back = got[Action.ONLOAD, "x"]
    assert back.exposed_seconds == 0
    assert back.end == plan.movement.slots[-1].end  # ends when the next period starts
    assert got[Action.ONLOAD, "y"].exposed_seconds > 0
    # The 1 s in for y runs behind the copies out, page by page: only its last page comes after the last page has left.
    assert plan.exposed_seconds == Fraction(4) + Fraction(1, 4)


def test_shared_links_halve_the_rate_and_double_the_time() -> None:
    alone = Device(4, 100, 50, 50, shared_bytes_per_s=50, sharers=1)
    both = replace(alone, sharers=2)
    assert (both.d2h, both.h2d) == (25, 25)
    assert planned(ROUND, THREE, both).busy_seconds == 2 * planned(ROUND, THREE, alone).busy_seconds
    with pytest.raises(ValueError, match="at least 1 byte/s"):
        Device(1, 1, 5, 5, shared_bytes_per_s=3, sharers=4)


def test_what_no_phase_needs_leaves_once() -> None:
    residents = [made("idle", 4, "", Kind.DIRTY), made("x", 4, "a b", Kind.DIRTY)]
    plan = planned(residents, period(("a", 1), ("b", 1)), Device(4, 4, 1, 1))
    assert plan.instructions == ()
    assert [(p.resident, p.bytes, p.seconds) for p in plan.priming] == [("idle", 4, 4)]
    assert plan.timeline.host_peak == 4
    assert isinstance(plan_swaps(residents, period(("a", 1), ("b", 1)), Device(4, 3, 1, 1)), Infeasible)


def test_a_clean_object_without_a_host_copy_is_copied_once_and_then_only_comes_back() -> None:
    residents = [made("ref", 4, "b", Kind.CLEAN), made("x", 4, "a", Kind.DROPPABLE)]
    plan = planned(residents, period(("a", 1), ("b", 1)), Device(4, 100, 1, 1))
    assert plan.offload_bytes == 0
    assert [(p.resident, p.bytes) for p in plan.priming] == [("ref", 4)]
    assert plan.timeline.host_peak == 4
    again = planned(
        [replace(residents[0], host_copy=True), residents[1]], period(("a", 1), ("b", 1)), Device(4, 100, 1, 1)
    )
    assert again.priming == ()


def test_equal_inputs_give_equal_plans() -> None:
    device = Device(64 * GIB, 200 * GIB, 20 * GIB, 20 * GIB)
    shuffled = [replace(r, needed=frozenset(reversed(sorted(r.needed)))) for r in TRAINING]
    assert planned(TRAINING, OPTIMIZER, device) == planned(shuffled, OPTIMIZER, device)


def test_a_plan_where_one_phase_decides_loads_no_solver() -> None:
    code = (
        "import sys\n"
        "from fractions import Fraction as F\n"
        "from rlflow.passes.analysis.memory.objects import *\n"
        "from rlflow.passes.analysis.memory.swap import plan_swaps\n"
        "period = Period((Phase('a', F(1)), Phase('b', F(1))))\n"
        "x = Resident('x', 'r', 5, frozenset('a'), Kind.DIRTY, page_bytes=2)\n"
        "y = Resident('y', 'r', 5, frozenset('b'), Kind.DIRTY, page_bytes=2)\n"
        "assert plan_swaps([x, y], period, Device(7, 99, 1, 1)).offload_bytes == 6\n"
        "assert not {'scipy', 'numpy', 'networkx', 'torch'} & set(sys.modules), 'loaded'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("residents", "message"),
    [
        ([made("x", 1, "nowhere", Kind.DIRTY)], "unknown phases: nowhere"),
        ([made("x", 1, "a", Kind.DIRTY), made("x", 2, "a", Kind.DIRTY)], "named twice: x"),
        ([made("x", -1, "a", Kind.DIRTY)], "not negative"),
        ([made("x", 1, "a", Kind.DIRTY, page=0)], "at least 1 byte"),
        ([made("x", 1, "a", Kind.DIRTY, host_copy=True)], "only a clean object"),
        ([made("x", 1, "a", Kind.DIRTY, rebuild_seconds=Fraction(1))], "only a droppable"),
    ],
)
def test_inputs_that_contradict_themselves_are_refused(residents: list[Resident], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_swaps(residents, period(("a", 1)), Device(9, 9, 1, 1))
