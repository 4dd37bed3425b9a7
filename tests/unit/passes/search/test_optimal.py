"""The search finds the best there is: against everything tried, and against the mixed-integer program."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_oracles import LIMIT, Moves, best_period, options, overflow, pool_time, publishing, reshards, resident

from rlflow.passes.search.decide import Decision, search
from rlflow.passes.search.devices import pool_sizes
from rlflow.passes.search.joint import swap_overflow
from rlflow.passes.search.milp import PoolColumn, solve_milp
from rlflow.passes.search.options import StageOption, StageTable
from rlflow.passes.search.pool_time import PoolTimes
from rlflow.passes.search.problem import DeviceType, Pins, PoolPin, Problem

STAGES = ("s0", "s1", "s2", "s3")
HOSTS = ((8,) * 8, (8, 8), (4, 4, 4), (6, 2, 3), (3, 5), (1,))

Tables = list[list[StageOption]]


@st.composite
def problems(draw: st.DrawFn, most_stages: int = 3) -> tuple[Tables, tuple[int, ...], Moves]:
    hosts = draw(st.sampled_from(HOSTS))
    count = draw(st.integers(1, most_stages))
    tables = [draw(options(pool_sizes(hosts), most=6)) for _ in range(count)]
    return tables, hosts, draw(reshards(STAGES[:count]))


def problem_of(tables: Tables, hosts: tuple[int, ...], moves: Moves, **more: object) -> Problem:
    stages = STAGES[: len(tables)]
    made = {stage: StageTable.of(some, LIMIT) for stage, some in zip(stages, tables, strict=True)}
    swap = more.pop("swap", None)
    kind = DeviceType("npu", hosts, LIMIT, made, swap)  # type: ignore[arg-type]
    return Problem(stages, (kind,), reshard=lambda *key: moves[key], **more)  # type: ignore[arg-type]


def period(problem: Problem) -> float:
    found = search(problem)
    return found.chosen.period if isinstance(found, Decision) else math.inf


@settings(max_examples=60, derandomize=True, deadline=None)
@given(problems(), st.booleans())
def test_it_equals_exhaustive_search(made: tuple[Tables, tuple[int, ...], Moves], swaps: bool) -> None:
    tables, hosts, moves = made
    price = overflow if swaps else resident
    expected = best_period(tables, pool_sizes(hosts), hosts, moves, price)
    problem = problem_of(tables, hosts, moves, alternatives=False, swap=swap_overflow(LIMIT, 1.0) if swaps else None)
    found = search(problem)
    assert isinstance(found, Decision) == (expected < math.inf)
    if isinstance(found, Decision):
        assert found.chosen.period == expected
        assert found.proven
        assert found.gap == 0.0
        assert found.bound.seconds <= expected * (1 + 1e-12)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(problems(most_stages=4))
def test_it_equals_the_mixed_integer_program(made: tuple[Tables, tuple[int, ...], Moves]) -> None:
    tables, _, moves = made
    hosts = (8,) * 8  # whole hosts and powers of two: as many devices as there are always find room
    problem = problem_of(tables, hosts, moves, alternatives=False)
    kind, sizes = problem.device_types[0], pool_sizes(hosts)
    times = PoolTimes(
        problem.stages, [kind.tables[s] for s in problem.stages], sizes, kind.swap_model, problem.reshard, problem.links
    )
    columns = [
        PoolColumn(block, 0, n, plan.seconds)
        for k in range(1, len(tables) + 1)
        for block in combinations(range(len(tables)), k)
        for n in sizes
        if (plan := times.at_most(block, n)) is not None
    ]
    found = solve_milp(len(tables), columns, [64])
    assert period(problem) == pytest.approx(math.inf if found is None else found[0], abs=1e-9)


@st.composite
def published(draw: st.DrawFn) -> tuple[tuple[Tables, tuple[int, ...], Moves], dict[int, int]]:
    """Problems in which the weights of some stages come from another one."""
    made = draw(problems())
    count = len(made[0])
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return made, dict(draw(st.lists(st.sampled_from(pairs), max_size=3))) if pairs else {}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(published(), st.booleans())
def test_publishes_between_pools_count(
    case: tuple[tuple[Tables, tuple[int, ...], Moves], dict[int, int]], swaps: bool
) -> None:
    """Against exhaustive search, and against the mixed-integer program over the same pools."""
    (tables, hosts, moves), sources = case
    price = overflow if swaps else resident
    expected = best_period(tables, pool_sizes(hosts), hosts, moves, price, sources=sources)
    swap = swap_overflow(LIMIT, 1.0) if swaps else None
    problem = problem_of(tables, hosts, moves, alternatives=False, swap=swap, links=publishing(sources))
    found = search(problem)
    assert (found.chosen.period if isinstance(found, Decision) else math.inf) == expected
    if isinstance(found, Decision):
        assert found.proven
        assert found.bound.seconds <= expected * (1 + 1e-12)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(published())
def test_publishes_count_in_the_mixed_integer_program(
    case: tuple[tuple[Tables, tuple[int, ...], Moves], dict[int, int]],
) -> None:
    (tables, _, moves), sources = case
    hosts = (8,) * 8
    problem = problem_of(tables, hosts, moves, alternatives=False, links=publishing(sources))
    stages = [f"s{i}" for i in range(len(tables))]
    columns = []
    for k in range(1, len(tables) + 1):
        for block in combinations(range(len(tables)), k):
            for n in pool_sizes(hosts):
                seconds = pool_time(block, n, tables, stages, moves, resident, sources)
                columns += [PoolColumn(block, 0, n, seconds)] if seconds < math.inf else []
    found = solve_milp(len(tables), columns, [64])
    assert period(problem) == pytest.approx(math.inf if found is None else found[0], abs=1e-9)


def test_the_program_refuses_what_cannot_be() -> None:
    assert solve_milp(2, [PoolColumn((0,), 0, 1, 1.0)], [8]) is None
    assert solve_milp(1, [PoolColumn((0,), 0, 9, 1.0)], [8]) is None
    two = [
        PoolColumn((0,), 0, 8, 3.0),
        PoolColumn((0,), 1, 8, 2.0),
        PoolColumn((1,), 1, 8, 2.0),
        PoolColumn((1,), 0, 8, 5.0),
    ]
    found = solve_milp(2, two, [8, 8])
    assert found is not None
    assert found[0] == 3.0


@settings(max_examples=40, derandomize=True, deadline=None)
@given(problems(), st.data())
def test_pins_are_kept_and_the_rest_is_optimal(
    made: tuple[Tables, tuple[int, ...], Moves], data: st.DataObject
) -> None:
    tables, hosts, moves = made
    stages = STAGES[: len(tables)]
    pinned = data.draw(st.lists(st.sampled_from(stages), max_size=2, unique=True))
    devices = data.draw(st.none() | st.sampled_from((*pool_sizes(hosts), 3)))
    layout = data.draw(st.sampled_from("ab"))
    pins = Pins(
        pools=(PoolPin("mine", tuple(pinned), devices),) if pinned else (),
        apart=(stages[-2:],) if len(stages) > 2 else (),
        layouts={stages[0]: lambda option: option.layout_class == layout},
    )
    numbers = [stages.index(stage) for stage in pinned]

    def allowed(partition: tuple[tuple[int, ...], ...], chosen: tuple[int, ...]) -> bool:
        at = {stage: number for number, block in enumerate(partition) for stage in block}
        if len(stages) > 2 and at[len(stages) - 1] == at[len(stages) - 2]:
            return False
        homes = {at[number] for number in numbers}
        return len(homes) <= 1 and all(devices is None or chosen[home] == devices for home in homes)

    legal = [[o for o in some if i or o.layout_class == layout] for i, some in enumerate(tables)]
    sizes = sorted({*pool_sizes(hosts), *([devices] if devices else [])})
    if devices == 3 and devices not in pool_sizes(hosts):  # a pinned size is for that pool only
        inner = allowed

        def allowed(partition: tuple[tuple[int, ...], ...], chosen: tuple[int, ...]) -> bool:
            other = [n for block, n in zip(partition, chosen, strict=True) if not set(block) & set(numbers)]
            return 3 not in other and inner(partition, chosen)

    expected = best_period(legal, sizes, hosts, moves, resident, allowed)
    found = search(problem_of(tables, hosts, moves, pins=pins))
    assert (found.chosen.period if isinstance(found, Decision) else math.inf) == expected
    if isinstance(found, Decision):
        every = [
            found.chosen,
            *(r.candidate for r in found.runners_up),
            *(a.other for a in found.alternatives if a.other),
        ]
        for candidate in every:
            assert candidate.option_of(stages[0]).layout_class == layout
            assert len(stages) < 3 or candidate.pool_of(stages[-1]) is not candidate.pool_of(stages[-2])
            for stage in pinned:
                assert candidate.pool_of(stage).name == "mine"
                assert devices in (None, candidate.pool_of(stage).devices)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(problems(), st.integers(1, 8))
def test_more_hosts_are_never_worse(made: tuple[Tables, tuple[int, ...], Moves], more: int) -> None:
    tables, hosts, moves = made
    before = period(problem_of(tables, hosts, moves, alternatives=False))
    after = period(problem_of(tables, (*hosts, *hosts[-1:] * more), moves, alternatives=False))
    assert after <= before


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.lists(st.tuples(options((1, 2, 4, 8), most=4), options((1, 2, 4), most=4)), min_size=1, max_size=3))
def test_two_types_of_devices(rows: list[tuple[list[StageOption], list[StageOption]]]) -> None:
    """Against the mixed-integer program with a row per type."""
    stages = STAGES[: len(rows)]
    kinds = []
    columns: list[PoolColumn] = []
    for number, (name, hosts) in enumerate((("big", (8,)), ("small", (4, 4)))):
        tables = {s: StageTable.of(row[number], LIMIT) for s, row in zip(stages, rows, strict=True)}
        kinds.append(DeviceType(name, hosts, LIMIT, tables))
        times = PoolTimes(stages, [tables[s] for s in stages], pool_sizes(hosts), kinds[-1].swap_model)
        columns += [
            PoolColumn(block, number, n, plan.seconds)
            for k in range(1, len(stages) + 1)
            for block in combinations(range(len(stages)), k)
            for n in pool_sizes(hosts)
            if (plan := times.at_most(block, n)) is not None
        ]
    expected = solve_milp(len(stages), columns, [8, 8])
    assert period(Problem(stages, tuple(kinds))) == (math.inf if expected is None else expected[0])
