"""The eviction program: greedy against HiGHS, integrality on a line, the gap of the relaxation in a circle."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.passes.analysis.memory.gaps import all_gaps, gaps_of
from rlflow.passes.analysis.memory.greedy import solve_greedily
from rlflow.passes.analysis.memory.lp import relaxation, solve
from rlflow.passes.analysis.memory.objects import Device, Kind, Period, Phase, Resident
from rlflow.passes.analysis.memory.program import Column, Program, Row, build, overflow

PLENTY = 10**9


def period(size: int, *, cyclic: bool) -> Period:
    return Period(tuple(Phase(f"p{i}", Fraction(1)) for i in range(size)), cyclic)


def made(name: str, size: int, needed: set[int], kind: Kind = Kind.DIRTY, page: int = 1) -> Resident:
    return Resident(name, "role", size, frozenset(f"p{i}" for i in needed), kind, page_bytes=page)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Covering rows over random columns; every row can be met."""
    columns = tuple(
        Column(None, draw(st.sampled_from([1, 2, 2, 2, 3])), draw(st.integers(1, 3)), Fraction(draw(st.integers(1, 6))))
        for _ in range(draw(st.integers(1, 5)))
    )
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.sets(st.integers(0, len(columns) - 1), min_size=1))
        most = sum(columns[i].unit * columns[i].limit for i in chosen)
        rows.append(Row({i: columns[i].unit for i in sorted(chosen)}, draw(st.integers(1, most))))
    return Program(columns, tuple(rows))


@settings(max_examples=80, deadline=None)
@given(programs())
def test_greedy_is_optimal_wherever_it_answers(program: Program) -> None:
    exact = solve(program)
    assert exact is not None
    assert program.satisfied(exact.counts)
    greedy = solve_greedily(program)
    if greedy is not None:
        assert program.satisfied(greedy.counts)
        assert program.seconds(greedy.counts) == program.seconds(exact.counts)
        assert greedy.bound_seconds <= exact.bound_seconds + 1e-9


def test_greedy_answers_where_one_phase_decides_and_not_where_two_pull_apart() -> None:
    columns = tuple(Column(None, 1, 5, Fraction(cost)) for cost in (1, 2, 3))
    decided = Program(columns, (Row({0: 1, 1: 1}, 4), Row({0: 1, 2: 1}, 3)))
    found = solve_greedily(decided)
    assert found is not None
    assert found.counts == (4, 0, 0)
    apart = Program(columns[1:], (Row({0: 1}, 2), Row({1: 1}, 3)))
    found = solve_greedily(apart)
    assert found is not None
    assert found.counts == (2, 3)
    both = Program(columns, (Row({0: 1, 1: 1}, 4), Row({1: 1, 2: 1}, 3)))
    assert solve_greedily(both) is None
    exact = solve(both)
    assert exact is not None
    assert exact.counts == (
        1,
        3,
        0,
    )  # 1 x 1 + 3 x 2 = 7, against 4 + 6 with the second phase served by the third column


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_on_a_line_the_relaxation_is_integral_in_pages_of_one_size(data: st.DataObject) -> None:
    """Interval matrices are totally unimodular."""
    size = data.draw(st.integers(2, 6))
    line = period(size, cyclic=False)
    residents = [
        made(f"r{i}", data.draw(st.integers(1, 9)), data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
        for i in range(data.draw(st.integers(1, 6)))
    ]
    least = max(sum(r.bytes for r in residents if f"p{i}" in r.needed) for i in range(size))
    device = Device(data.draw(st.integers(least, sum(r.bytes for r in residents))), PLENTY, 3, 7)
    program = build(all_gaps(residents, line), overflow(residents, line, device), PLENTY, line, device)
    if program.rows:
        found = solve(program)
        assert found is not None
        assert float(program.seconds(found.counts)) == pytest.approx(found.bound_seconds)


def test_in_a_circle_the_relaxation_can_be_a_quarter_below() -> None:
    circle = period(3, cyclic=True)
    residents = [made(f"r{i}", 1, {i}) for i in range(3)]
    device = Device(2, PLENTY, 2, 2)  # dirty: half a second out and half a second back
    program = build(all_gaps(residents, circle), overflow(residents, circle, device), PLENTY, circle, device)
    relaxed = relaxation(program)
    assert relaxed is not None
    assert relaxed[1] == pytest.approx(1.5)
    found = solve(program)
    assert found is not None
    assert program.seconds(found.counts) == 2
    assert sorted(found.counts) == [0, 1, 1]


def test_rows_that_no_counts_meet_are_infeasible() -> None:
    program = Program((Column(None, 2, 1, Fraction(1)),), (Row({0: 2}, 3),))
    assert solve(program) is None
    assert solve_greedily(program) is None
    assert solve(Program((), ())) is not None
    assert solve(Program((), (Row({}, 1),))) is None


def test_large_odd_sizes_are_met_to_the_byte() -> None:
    """Sizes without a common divisor, near what floating point resolves: the answer is checked in integers."""
    circle = period(4, cyclic=True)
    page = 64 * 2**20
    residents = [made(f"r{i}", 37 * 2**30 + 12_345_677 * (i + 1), {i, (i + 1) % 4}, page=page) for i in range(4)]
    for hbm in (3 * residents[3].bytes + 1, 2 * residents[3].bytes + 1):
        device = Device(hbm, 2**50, 10**10, 10**10)
        over = overflow(residents, circle, device)
        program = build(all_gaps(residents, circle), over, 2**50, circle, device)
        found = solve(program)
        assert found is not None
        assert program.satisfied(found.counts)
        pages = float(program.seconds(found.counts)) - found.bound_seconds
        assert 0 <= pages + 1e-6 <= 4 * 2 * page / 10**10


# --- gaps ------------------------------------------------------------------------------------------------------------


def test_gaps_wrap_in_a_circle_and_not_on_a_line() -> None:
    resident = made("r", 4, {1, 3})
    assert [gap.phases for gap in gaps_of(resident, period(5, cyclic=True))] == [(2,), (4, 0)]
    assert [gap.phases for gap in gaps_of(resident, period(5, cyclic=False))] == [(0,), (2,), (4,)]
    assert [gap.label(period(5, cyclic=True)) for gap in gaps_of(resident, period(5, cyclic=True))] == ["p2", "p4..p0"]
    assert gaps_of(made("r", 4, {0, 1}), period(2, cyclic=True)) == ()
    assert gaps_of(made("r", 0, {0}), period(2, cyclic=True)) == ()


@pytest.mark.parametrize(
    ("kind", "settings_", "circle", "line"),
    [
        (Kind.DIRTY, {}, [Fraction(8, 2) + Fraction(8, 4)], [Fraction(8, 4), Fraction(8, 2)]),
        (Kind.CLEAN, {"host_copy": True}, [Fraction(8, 4)], [Fraction(8, 4), 0]),
        (Kind.DROPPABLE, {"rebuild_seconds": Fraction(9)}, [9], [9, 0]),
    ],
)
def test_what_a_gap_costs(
    kind: Kind, settings_: dict[str, object], circle: list[Fraction], line: list[Fraction]
) -> None:
    """8 bytes out at 2 bytes/s and back at 4. On a line the gap before the use has nothing to save, the one after it
    nothing to bring back."""
    device = Device(9, 9, 2, 4)
    resident = Resident("r", "role", 8, frozenset({"p1"}), kind, **settings_)  # type: ignore[arg-type]
    assert [gap.seconds(8, device) for gap in gaps_of(resident, period(3, cyclic=True))] == circle
    assert [gap.seconds(8, device) for gap in gaps_of(resident, period(3, cyclic=False))] == line
