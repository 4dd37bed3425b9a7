"""Deterministic plans against the theory of marked graphs: the period, and every single end of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlflow.backends.simulator.clock import Time
from rlflow.backends.simulator.run import Options, simulate
from rlflow.ir.decisions import Reshard, Swap
from rlflow.ir.flow import Flow
from rlflow.ir.ops import Train
from rlflow.passes.analysis.steady import token_graph
from rlflow.passes.analysis.tokens.game import play
from rlflow.passes.analysis.tokens.graph import TokenGraph
from rlflow.passes.analysis.tokens.period import period
from rlflow.plan import Plan

MakePlan = Callable[..., Plan]
MakeFlow = Callable[..., Flow]

STALE = [
    "",
    "staleness m = 1 step",
    "staleness m = 2 steps",
    "staleness m = 3 steps",
    "staleness m = 3 steps, depth = 2 steps",
    "staleness m = 2 steps, depth = 1 step",
    "staleness m = 1 step\ntrigger s at 75%, carry partial",
    "trigger s at 70%, carry finish",
    "trigger s at 50%, carry nothing",
]
ALONE = [("grpo", "one pool"), ("grpo", "other layout"), ("grpo", "small devices"), ("ppo", "one pool")]
ALONE += [("teacher", "one pool"), ("teacher", "split")]
APART = [("grpo", name) for name in ("split", "much training", "hybrid", "three pools")]
APART += [("ppo", "split"), ("ppo", "critic apart")]
TWO_CALLS = [("remax", "split")]
"""Two calls of Python functions want the same workers; the token graph does not know that. Left out where they take
time."""
LENT = [("grpo", "lent"), ("grpo", "lent by two"), ("remax", "lent")]
CASES = [(flow, name, "") for flow, name in ALONE]
CASES += [(flow, name, stale) for flow, name in [*APART, *TWO_CALLS] for stale in STALE]
FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize(("flow", "places", "staleness"), CASES)
def test_period_is_the_maximum_cycle_ratio(make_plan: MakePlan, flow: str, places: str, staleness: str) -> None:
    # Long responses where the cost model then moves objects, which is what these plans are for.
    plan = make_plan(places, staleness, flow, 4096 if places == "small devices" else 1024)
    assert plan.cadence is not None
    found = simulate(plan, Options(steps=24))
    assert float(found.period) == pytest.approx(plan.cadence.us, rel=1e-6)
    for stage, ages in found.ages.items():
        promised = found.promised[stage]
        assert promised is not None
        assert max(ages) <= promised


@pytest.mark.parametrize(
    ("flow", "places", "staleness"),
    [(flow, name, stale) for flow, name in LENT for stale in STALE if "trigger" not in stale],
)
def test_the_period_where_devices_are_lent(make_plan: MakePlan, flow: str, places: str, staleness: str) -> None:
    """The token graph does not know that the reshards of several samplers leave by the same links, so that one may wait
    for the other."""
    plan = make_plan(places, staleness, flow)
    assert plan.cadence is not None
    found = simulate(plan, Options(steps=24))
    at_once = sum(reshard.us for reshard in plan.reshards)
    assert plan.cadence.us * (1 - 1e-6) <= float(found.period) <= plan.cadence.us + at_once
    assert sum(stage.op.kind == "generate" for stage in plan.stages) >= 2
    for stage, ages in found.ages.items():
        promised = found.promised[stage]
        assert promised is not None
        assert max(ages) <= promised


def test_some_plans_move_objects_to_the_host(make_plan: MakePlan) -> None:
    """Else the periods above say nothing about copies."""
    plan = make_plan("small devices", max_new=4096)
    moves = [i for program in plan.programs for i in program.step if i.kind in ("offload", "onload")]
    assert any(move.exposed_us for move in moves if move.kind in ("offload", "onload"))
    assert any(move.us > move.exposed_us for move in moves if move.kind in ("offload", "onload"))


@pytest.mark.parametrize(
    ("pool", "before", "more"), [("gen", "reshard m", 0), ("fit", "publish m", 2), ("gen", "s", 2), ("fit", "ref", 2)]
)
@pytest.mark.parametrize("staleness", ["", "staleness m = 1 step"])
def test_copies_between_stages_count_where_they_stand(
    check_flow: MakeFlow, freeze_flow: Callable[[Flow], Plan], pool: str, before: str, more: int, staleness: str
) -> None:
    """In front of weights that are received or sent, too. A pool that waits for weights has time for copies."""
    checked = check_flow("split", staleness)
    swap = Swap(pool=pool, action="offload", object="x", bytes=8, before=before, us=3_000_000, exposed_us=2_000_000)
    without = float(period(token_graph(checked)).value)
    checked = replace(checked, decisions=(*checked.decisions, swap))
    expected = float(period(token_graph(checked)).value)
    if not staleness:  # else another pool may set the period
        assert expected == pytest.approx(without + more)
    found = simulate(freeze_flow(checked), Options(steps=24))
    assert float(found.period) == pytest.approx(expected * 1e6, rel=1e-6)


@given(
    case=st.sampled_from([(flow, name, stale) for flow, name in APART for stale in STALE]),
    times=st.lists(st.integers(0, 9_000_000), min_size=12, max_size=12),
)
@FEW
def test_period_under_any_stated_times(
    make_plan: MakePlan, check_flow: MakeFlow, case: tuple[str, str, str], times: list[int]
) -> None:
    """Times that no cost model would give, those of Python functions too."""
    flow, places, staleness = case
    plan, checked = make_plan(places, staleness, flow), check_flow(places, staleness, flow)
    graph = token_graph(checked)
    names = [stage.name for stage in graph.stages if not stage.name.startswith("reshard ")]
    stated = dict(zip(names, times, strict=False))
    resharded = {stage.name: 0 for stage in graph.stages if stage.name.startswith("reshard ")}
    times_of = {name: us / 1e6 for name, us in stated.items()} | {"reshard m": 0.0}
    if not any(i.kind == "reshard" and i.model == "m" for program in plan.programs for i in program.step):
        del times_of["reshard m"]
    found = simulate(plan, Options(steps=60, stated=times_of, draw=None))
    expected = period(_timed(checked, stated | resharded)).value * 1_000_000
    assert float(found.period) == pytest.approx(float(expected), rel=1e-6, abs=1e-3)


def _timed(flow: Flow, times: dict[str, int]) -> TokenGraph:
    """The token graph with exactly these microseconds: what reshards take by the plan is taken off."""
    graph = token_graph(flow)
    stages = tuple(replace(stage, duration=Fraction(times.get(stage.name, 0), 1_000_000)) for stage in graph.stages)
    return replace(graph, stages=stages)


def _drawn(seed: int, name: str, number: int) -> int:
    digest = blake2b(f"{seed}/{name}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 5_000_000


@given(
    case=st.sampled_from([(flow, name, stale) for flow, name in [*ALONE[:2], *APART] for stale in STALE]),
    seed=st.integers(0, 10**6),
    copies=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5_000_000)), max_size=3),
)
@FEW
def test_every_end_of_a_step_is_that_of_the_token_game(
    check_flow: MakeFlow,
    freeze_flow: Callable[[Flow], Plan],
    case: tuple[str, str, str],
    seed: int,
    copies: list[tuple[int, int]],
) -> None:
    """Under random times and copies, step by step and to the microsecond. Reshards take none here: the simulator leaves
    out those that have nothing to bring, at the start of a run."""
    flow, places, staleness = case
    if (flow, places) in ALONE:
        staleness = ""
    checked = check_flow(places, staleness, flow)
    spots = [(n.placement.pool, n.id) for n in checked.nodes.values() if n.placement and n.placement.layout]
    spots += [(reshard.target, f"reshard {reshard.id}") for reshard in checked.decided(Reshard)]
    swaps = [
        Swap(pool=pool, action="offload", object="x", bytes=8, before=before, us=us, exposed_us=us)
        for (pool, before), us in ((spots[number % len(spots)], us) for number, us in copies)
    ]
    checked = replace(checked, decisions=(*checked.decisions, *swaps))
    plan, graph = freeze_flow(checked), token_graph(checked)

    def draw(name: str, step: int, known: Time) -> Time:
        return 0 if name.startswith("reshard ") else _drawn(seed, name, step)

    found = simulate(plan, Options(steps=25, warm_up=0, draw=draw))

    def seconds(name: str, firing: int) -> int:
        if name.startswith("copies before "):
            return round(graph.stage(name).duration * 1_000_000)
        return int(draw(name, firing, 0))

    game = play(graph, 25, seconds)
    assert not game.stuck
    trainers = [node.id for node in checked.nodes.values() if isinstance(node.op, Train)]
    assert found.ends == tuple(max(game.ends[name][step] for name in trainers) for step in range(25))
