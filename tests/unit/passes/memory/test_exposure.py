"""Seconds that swapping adds, against the linear program that lets amounts flow."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings

from rlflow.passes.analysis.memory.choice import Infeasible
from rlflow.passes.analysis.memory.exposure import least_exposed
from rlflow.passes.analysis.memory.objects import Device, Kind, Period, Phase, Resident
from rlflow.passes.analysis.memory.spread import Step, spread
from rlflow.passes.analysis.memory.swap import Objective, SwapPlan, plan_swaps


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rlflow_memory_oracle_of_exposure", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


oracle: Any = _load(Path(__file__).parent / "oracle.py")
NOISE = 1e-6


def finer(case: Any, factor: int) -> Any:
    """The same problem with every page in `factor` parts: times are equal, pages small."""
    residents, period, device = case
    return (
        [replace(r, bytes=r.bytes * factor, page_bytes=1) for r in residents],
        period,
        replace(
            device,
            hbm_bytes=device.hbm_bytes * factor,
            host_bytes=10**9,
            d2h_bytes_per_s=device.d2h_bytes_per_s * factor,
            h2d_bytes_per_s=device.h2d_bytes_per_s * factor,
        ),
    )


@settings(max_examples=30, deadline=None)
@given(case=oracle.cases())
def test_no_plan_adds_less_than_the_bound(case: Any) -> None:
    residents, period, device = case
    device = replace(device, host_bytes=10**9)
    plan = plan_swaps(residents, period, device)
    least = least_exposed(residents, period, device)
    if isinstance(plan, Infeasible):
        assert least is None
        return
    assert least is not None
    given_amounts = least_exposed(residents, period, device, plan.evictions)
    assert given_amounts is not None
    assert float(plan.bounds.exposed_seconds) <= least[0] + NOISE
    assert least[0] <= given_amounts[0] + NOISE
    assert given_amounts[0] <= float(plan.exposed_seconds) + NOISE


@settings(max_examples=30, deadline=None)
@given(case=oracle.cases(cyclic=True))
def test_with_small_pages_the_layout_in_time_is_the_best_there_is(case: Any) -> None:
    """What remains is one page per direction and boundary, and what a page cannot use of a phase's end."""
    residents, period, device = finer(case, 64)
    plan = plan_swaps(residents, period, device)
    if isinstance(plan, SwapPlan):
        least = least_exposed(residents, period, device, plan.evictions)
        assert least is not None
        page = 1 / device.d2h + 1 / device.h2d
        assert float(plan.exposed_seconds) <= least[0] + 2 * len(period.phases) * page + NOISE


@settings(max_examples=30, deadline=None)
@given(case=oracle.cases())
def test_a_plan_for_least_exposed_seconds_is_sound_and_states_what_is_left_to_gain(case: Any) -> None:
    residents, period, device = case
    usual = plan_swaps(residents, period, device)
    plan = plan_swaps(residents, period, device, objective=Objective.EXPOSED)
    if isinstance(plan, Infeasible):
        assert isinstance(usual, Infeasible)
        return
    assert isinstance(usual, SwapPlan)
    oracle.replay(plan, residents, period, device)
    assert plan.exposed_seconds <= usual.exposed_seconds
    assert plan.busy_seconds >= usual.busy_seconds
    assert plan.least_exposed_seconds is not None
    assert plan.least_exposed_seconds <= float(plan.exposed_seconds) + NOISE


def test_the_objective_decides_between_fewer_bytes_and_fewer_seconds_added() -> None:
    """In b the device is 10 bytes too full. `near` (clean) costs 10 s of link but must be back right after b, so all of
    it is exposed; `far` (dirty) costs 20 s, hidden behind long phases in which there is room."""
    period = Period(
        (
            Phase("a", Fraction(1)),
            Phase("lead", Fraction(50)),
            Phase("b", Fraction(1)),
            Phase("c", Fraction(1)),
            Phase("rest", Fraction(50)),
        )
    )
    residents = [
        Resident("near", "role", 10, frozenset({"a", "lead", "c", "rest"}), Kind.CLEAN, host_copy=True, page_bytes=1),
        Resident("far", "role", 10, frozenset({"a"}), Kind.DIRTY, page_bytes=1),
        Resident("big", "role", 20, frozenset({"b"}), Kind.DROPPABLE, page_bytes=1),
    ]
    device = Device(30, 99, 1, 1)
    usual = plan_swaps(residents, period, device)
    hidden = plan_swaps(residents, period, device, objective=Objective.EXPOSED)
    assert isinstance(usual, SwapPlan)
    assert isinstance(hidden, SwapPlan)
    assert (usual.busy_seconds, usual.exposed_seconds) == (10, 10)
    assert (hidden.busy_seconds, hidden.exposed_seconds) == (20, 0)
    assert hidden.moved(Kind.DIRTY) == ("far",)
    assert hidden.least_exposed_seconds == pytest.approx(0.0)


# --- the queue -------------------------------------------------------------------------------------------------------


def pages(first: int, count: int, size: int = 2) -> tuple[tuple[int, int, int], ...]:
    return tuple((0, number, size) for number in range(first, first + count))


def test_a_queue_moves_before_a_phase_only_what_its_limit_demands() -> None:
    steps = [Step(pages(0, 5), 6, 6, 5), Step((), 100, 100, 100)]
    first, second = spread(steps, cyclic=False)
    assert [page for _, page, _ in first.before] == [0, 1]  # 10 bytes arrive, 6 may wait
    assert [page for _, page, _ in first.during] == [2, 3]  # 5 bytes of window hold two pages of 2
    assert (first.start_bytes, first.end_bytes) == (6, 2)
    assert [page for _, page, _ in second.during] == [4]


def test_a_limit_at_the_end_of_a_phase_counts_too() -> None:
    (only,) = spread([Step(pages(0, 5), 100, 2, 4)], cyclic=False)
    assert len(only.before) == 2  # 10 bytes - 4 beside the phase - 2 that may wait
    assert (only.start_bytes, only.end_bytes) == (6, 2)


def test_a_cyclic_queue_goes_on_into_the_next_period() -> None:
    steps = [Step((), 100, 100, 4), Step(pages(0, 3), 100, 100, 2)]
    first, second = spread(steps, cyclic=True)
    assert [page for _, page, _ in second.during] == [0]
    assert [page for _, page, _ in first.during] == [1, 2]
    assert (first.start_bytes, first.end_bytes) == (4, 0)


def test_a_queue_that_never_drains_is_emptied_once_a_period() -> None:
    steps = [Step(pages(0, 3), 100, 100, 2), Step((), 100, 100, 0)]
    first, second = spread(steps, cyclic=True)
    moved = [*first.before, *first.during, *second.before, *second.during]
    assert sorted(moved) == sorted(pages(0, 3))
