"""Few tokens: the period of a step, and the sizes that make it shortest."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_oracles import LIMIT, Moves, has_room, options, publishing, reshards, set_partitions

from rlflow.passes.search import solver as solver_module
from rlflow.passes.search.decide import Decision, search
from rlflow.passes.search.devices import pool_sizes
from rlflow.passes.search.joint import Load
from rlflow.passes.search.options import StageOption, StageTable
from rlflow.passes.search.pool_time import PoolPlan, PoolTimes
from rlflow.passes.search.problem import DeviceType, Problem
from rlflow.passes.search.sizing import PoolChoice, exhaustive, local_search
from rlflow.passes.search.synchronous import StepGraph


def plan(times: dict[str, float], before: tuple[float, ...] | None = None, swap: float = 0.0) -> PoolPlan:
    choices = tuple(StageOption(1, seconds, 0, 0, None, None) for seconds in times.values())
    moved = before or (0.0,) * len(times)
    return PoolPlan(tuple(times), 1, sum(times.values()) + sum(moved) + swap, choices, moved, swap, Load(0, 0))


STEP = StepGraph(
    ("rollout", "reference", "reward", "train"),
    (("rollout", "reference"), ("rollout", "reward"), ("reference", "train"), ("reward", "train")),
)


@pytest.mark.parametrize(
    ("pools", "period"),
    [
        # One pool: the sum, with its reshards and its swap.
        ([plan({"rollout": 10.0, "reference": 2.0, "reward": 3.0, "train": 5.0}, (1.0, 0.0, 0.0, 2.0), 0.5)], 23.5),
        # Series and parallel: reference and reward overlap.
        ([plan({"rollout": 10.0}), plan({"reference": 2.0}), plan({"reward": 3.0}), plan({"train": 5.0})], 18.0),
        # Together on one pool they do not.
        ([plan({"rollout": 10.0}), plan({"reference": 2.0, "reward": 3.0}), plan({"train": 5.0})], 20.0),
        # A reshard hides behind another pool's stage, as far as that is long enough.
        ([plan({"rollout": 10.0, "train": 5.0}, (0.0, 4.0)), plan({"reference": 2.0}), plan({"reward": 3.0})], 19.0),
    ],
)
def test_the_period_of_a_step(pools: list[PoolPlan], period: float) -> None:
    assert STEP(pools) == period


def test_edges_lead_forward() -> None:
    with pytest.raises(ValueError, match="backwards"):
        StepGraph(("a", "b"), (("b", "a"),))


@settings(max_examples=80, derandomize=True, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True), min_size=1, max_size=3),
    st.integers(3, 20),
    st.randoms(use_true_random=False),
)
def test_branch_and_bound_equals_trying_all(sizes: list[list[int]], devices: int, random: object) -> None:
    """Periods are any function that never grows with a size."""
    work = [random.randint(1, 30) for _ in sizes]  # type: ignore[attr-defined]
    pools = [[PoolChoice(n, 0) for n in sorted(some)] for some in sizes]

    def evaluate(choices: tuple[PoolChoice, ...]) -> float:
        parts = [w // c.devices for w, c in zip(work, choices, strict=True)]
        return float(max(sum(parts[:2]), sum(parts[1:]), *parts))

    def room(choices: object) -> bool:
        return sum(choice.devices for choice in choices) <= devices  # type: ignore[attr-defined]

    every = [c for c in product(*pools) if room(c)]
    best = min(((evaluate(c), sum(x.devices for x in c), c) for c in every), default=None)
    asked: list[tuple[PoolChoice, ...]] = []

    def counted(choices: tuple[PoolChoice, ...]) -> float:
        asked.append(choices)
        return evaluate(choices)

    found = exhaustive(pools, room, counted, evaluate, math.inf)
    assert (None if found is None else found.key) == best
    assert len(asked) <= len(every)
    if found is not None:
        assert exhaustive(pools, room, evaluate, evaluate, found.period) is not None
        assert exhaustive(pools, room, evaluate, evaluate, math.nextafter(found.period, -1.0)) is None
        start = min(every, key=lambda c: sum(x.devices for x in c))
        near = local_search(pools, room, evaluate, [start])
        assert near is not None
        assert found.period <= near.period <= evaluate(start)
        assert not near.exact


def test_local_search_moves_devices_from_one_pool_to_another() -> None:
    """20 / n + 60 / m on 16 devices that are all taken at the start, 15 and 1: no pool can grow alone."""
    pools = [[PoolChoice(n, 0) for n in range(1, 16)] for _ in range(2)]

    def evaluate(choices: tuple[PoolChoice, ...]) -> float:
        return 20.0 / choices[0].devices + 60.0 / choices[1].devices

    found = local_search(
        pools, lambda c: sum(x.devices for x in c) <= 16, evaluate, [(PoolChoice(15, 0), PoolChoice(1, 0))]
    )
    assert found is not None
    assert [c.devices for c in found.choices] == [6, 10]
    assert found.period == min(20.0 / n + 60.0 / (16 - n) for n in range(1, 16))


STAGES = ("s0", "s1", "s2")
GRAPHS = ((), (("s0", "s1"), ("s1", "s2")), (("s0", "s2"), ("s1", "s2")), (("s0", "s1"), ("s0", "s2")))


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    st.sampled_from([(8, 8), (4, 4, 4), (3, 2)]),
    st.sampled_from(GRAPHS),
    st.data(),
    reshards(STAGES),
    st.booleans(),
    st.sampled_from([{}, {0: 2}, {0: 2, 1: 2}]),
)
def test_the_search_equals_trying_all(
    hosts: tuple[int, ...],
    edges: tuple[tuple[str, str], ...],
    data: st.DataObject,
    moves: Moves,
    local: bool,
    sources: dict[int, int],
) -> None:
    """Every partition and all sizes, each pool on its fastest layouts. Local search is never better, and says so."""
    sizes = pool_sizes(hosts)
    tables = {stage: StageTable.of(data.draw(options(sizes, most=5)), LIMIT) for stage in STAGES}
    kind = DeviceType("npu", hosts, LIMIT, tables)
    graph = StepGraph(STAGES, edges)
    links = publishing(sources)
    problem = Problem(STAGES, (kind,), reshard=lambda *key: moves[key], links=links, period=graph, alternatives=False)
    times = PoolTimes(STAGES, list(tables.values()), sizes, kind.swap_model, problem.reshard, links)
    best = math.inf
    for partition in set_partitions(3):
        for chosen in product(sizes, repeat=len(partition)):
            if sum(chosen) <= sum(hosts) and has_room(chosen, hosts):
                plans = [times.at_most(block, n) for block, n in zip(partition, chosen, strict=True)]
                if all(plans):
                    best = min(best, graph([plan for plan in plans if plan is not None]))
    with pytest.MonkeyPatch.context() as patch:
        if local:
            patch.setattr(solver_module, "MOST_SIZINGS", 3)
        found = search(problem)
    if not isinstance(found, Decision):
        assert best == math.inf
    elif found.proven:
        assert found.chosen.period == best
        assert found.gap == 0.0
    else:
        assert local
        assert best <= found.chosen.period
        assert found.lower_bound <= best * (1 + 1e-9)
        assert found.chosen.period <= best * (1 + found.gap) * (1 + 1e-9)
