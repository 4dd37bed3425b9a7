"""Problems that fit to the byte, with sizes far apart: rounding of a solver must not decide."""

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
from hypothesis import strategies as st

from rlflow.amounts import GIB
from rlflow.passes.analysis.memory.choice import Infeasible
from rlflow.passes.analysis.memory.objects import Device, Kind, Period, Phase, Resident
from rlflow.passes.analysis.memory.swap import SwapPlan, least_peak, plan_swaps


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rlflow_memory_oracle_of_sizes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


oracle: Any = _load(Path(__file__).parent / "oracle.py")


@st.composite
def large_cases(draw: st.DrawFn) -> Any:
    """Sizes of real devices, to the byte: tails everywhere, up to ten phases, a host that may be too small."""
    names = [f"p{i}" for i in range(draw(st.integers(3, 10)))]
    steps = Period(tuple(Phase(name, Fraction(draw(st.integers(1, 300)))) for name in names), draw(st.booleans()))
    residents = []
    for i in range(draw(st.integers(4, 12))):
        kind = draw(st.sampled_from(Kind))
        residents.append(
            Resident(
                f"r{i}",
                "owner",
                draw(st.integers(1, 20 * GIB)),
                frozenset(name for name in names if draw(st.integers(0, 2)) == 0),
                kind,
                Fraction(draw(st.integers(0, 3))) if kind is Kind.DROPPABLE else Fraction(0),
                kind is Kind.CLEAN and draw(st.booleans()),
                page_bytes=256 * 2**20,
            )
        )
    total = sum(resident.bytes for resident in residents)
    least = least_peak(residents, steps)
    host = total * draw(st.sampled_from([1, 3, 5, 10, 90])) // 10
    return residents, steps, Device(draw(st.integers(least, max(least, total))), host, 40 * 10**9, 45 * 10**9)


@settings(max_examples=25, deadline=None)
@given(case=large_cases(), whole=st.booleans())
def test_plans_of_real_sizes_replay_and_host_shortage_is_enough(case: Any, whole: bool) -> None:
    residents, steps, device = case
    plan = plan_swaps(residents, steps, device, whole=whole)
    if isinstance(plan, SwapPlan):
        pages = [resident.whole() for resident in residents] if whole else residents
        oracle.replay(plan, pages, steps, device)
        assert plan.timeline.host_peak <= device.host_bytes
        assert float(plan.busy_seconds) >= plan.bounds.busy_seconds * (1 - 1e-9)
    else:
        assert plan.resource == "host"
        enough = replace(device, host_bytes=device.host_bytes + plan.missing_bytes)
        assert isinstance(plan_swaps(residents, steps, enough, whole=whole), SwapPlan)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_least_memory_that_the_needs_allow_is_enough_and_a_byte_less_is_not(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 6))
    names = [f"p{i}" for i in range(size)]
    period = Period(tuple(Phase(name, Fraction(1)) for name in names), data.draw(st.booleans()))
    residents = [
        Resident(
            f"r{i}",
            "role",
            data.draw(st.sampled_from([1, 3, 10**6, 10**6 + 1, 10**10, 3 * 10**10 + 7])),
            frozenset(data.draw(st.sets(st.sampled_from(names), min_size=1))),
            data.draw(st.sampled_from([Kind.DIRTY, Kind.CLEAN])),
        )
        for i in range(data.draw(st.integers(2, 8)))
    ]
    least = least_peak(residents, period)
    total = sum(resident.bytes for resident in residents)
    plan = plan_swaps(residents, period, Device(least, 2 * total, 10**9, 10**9))
    assert isinstance(plan, SwapPlan)
    assert plan.peak_bytes == least  # the phase that needs most is full, and never more
    short = plan_swaps(residents, period, Device(least - 1, 2 * total, 10**9, 10**9))
    assert isinstance(short, Infeasible)
    assert (short.resource, short.missing_bytes) == ("device", 1)
    assert sum(size for _, size in short.holders) == least


def test_one_byte_beside_a_large_page_is_not_forgotten() -> None:
    """Three objects of 10 GB and one of a byte, all of which must leave in turn: the byte counts."""
    period = Period(tuple(Phase(f"p{i}", Fraction(10)) for i in range(4)))
    sizes = [10**10, 10**10, 10**10, 1]
    residents = [
        Resident(f"r{i}", "role", size, frozenset({f"p{i}"}), Kind.DIRTY, page_bytes=10**10)
        for i, size in enumerate(sizes)
    ]
    plan = plan_swaps(residents, period, Device(10**10, 10**12, 10**10, 10**10))
    assert isinstance(plan, SwapPlan)
    # Phases p0..p2 hold one large object each and nothing else; p3 holds the byte and none of the large ones.
    assert plan.offload_bytes == plan.onload_bytes == 3 * 10**10 + 1
    assert float(plan.busy_seconds) == pytest.approx(6.0)
