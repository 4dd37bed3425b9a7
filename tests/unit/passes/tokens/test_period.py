from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_graphs import cycles, few, graphs, is_live, live_graphs, loop, period_of, rated_graphs, seconds_of, tokens_of

from rlflow.passes.analysis.tokens.expand import expand
from rlflow.passes.analysis.tokens.feasible import earliest_starts
from rlflow.passes.analysis.tokens.game import play
from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph, TokenStage
from rlflow.passes.analysis.tokens.howard import Weighted, howard
from rlflow.passes.analysis.tokens.liveness import DeadlockError, deadlock
from rlflow.passes.analysis.tokens.oracle import solve
from rlflow.passes.analysis.tokens.period import Period, period
from rlflow.passes.analysis.tokens.steady import steady_state


def _check(graph: TokenGraph, found: Period) -> None:
    """The cycle has the ratio, the starts keep every edge: together a proof of the period."""
    if found.cycle:
        for edge, after in zip(found.cycle, found.cycle[1:] + found.cycle[:1], strict=True):
            assert edge in graph.closed
            assert edge.dst == after.src
        assert seconds_of(graph, list(found.cycle)) == found.value * tokens_of(list(found.cycle))
    else:
        assert found.value == 0
    assert not found.starts or min(found.starts.values()) == 0
    for edge in graph.closed:
        ready = found.starts[edge.src] + graph.stage(edge.src).exact - found.value * edge.tokens
        assert found.starts[edge.dst] >= ready


@given(live_graphs())
@few
def test_howard_equals_all_cycles_equals_the_linear_programme(graph: TokenGraph) -> None:
    found = period(graph)
    assert found.value == period_of(graph)
    assert solve(graph).period == pytest.approx(float(found.value), rel=1e-9, abs=1e-9)
    _check(graph, found)


@given(live_graphs(most=4, connected=True))
@few
def test_howard_equals_the_slope_of_the_game(graph: TokenGraph) -> None:
    steady = steady_state(graph)
    assert steady is not None
    assert steady.period == period(graph).value


@given(live_graphs(most=7))
@few
def test_each_part_has_its_own_period_and_each_stage_the_slowest_above_it(graph: TokenGraph) -> None:
    found = period(graph)
    assert sorted(name for part in found.components for name in part.stages) == [s.name for s in graph.stages]
    above = {stage.name: {stage.name} for stage in graph.stages}
    for _ in graph.stages:
        for edge in graph.closed:
            above[edge.dst] |= above[edge.src]
    every = list(cycles(graph))
    for part in found.components:
        own = [c for c in every if c[0].src in part.stages]
        assert part.period == max((seconds_of(graph, c) / tokens_of(c) for c in own), default=0)
        for name in part.stages:
            over = [c for c in every if c[0].src in above[name]]
            assert found.effective[name] == max((seconds_of(graph, c) / tokens_of(c) for c in over), default=0)
            assert above[name] & above[part.stages[0]] == above[name]


@given(live_graphs(most=4))
@few
def test_the_effective_period_is_what_the_game_does(graph: TokenGraph) -> None:
    found = period(graph)
    game = play(graph, 240, lambda name, _: graph.stage(name).exact)
    # Starts differ from k * period by a bounded number of seconds: all stages once, for each token on the way.
    slop = 40 * (1 + sum(stage.exact for stage in graph.stages))
    for name, starts in game.starts.items():
        assert abs(starts[-1] - 239 * found.effective[name]) <= slop


@given(graphs())
@few
def test_a_graph_has_a_period_iff_it_is_live(graph: TokenGraph) -> None:
    if is_live(graph):
        _check(graph, period(graph))
    else:
        for analysis in (period, solve):
            with pytest.raises(DeadlockError):
                analysis(graph)


@given(rated_graphs(most=3, connected=True))
@few
def test_with_rates_the_expanded_graph_has_the_period_of_the_game(graph: TokenGraph) -> None:
    if deadlock(graph) is None:
        steady = steady_state(graph)
        assert steady is not None
        assert steady.period == period(expand(graph).graph).value
    else:
        assert steady_state(graph) is None
        assert deadlock(expand(graph).graph) is not None


@given(live_graphs(), st.data())
@few
def test_shorter_durations_and_more_tokens_are_never_slower(graph: TokenGraph, data: st.DataObject) -> None:
    less = {s.name: s.exact * data.draw(st.sampled_from([1, Fraction(1, 2), 0])) for s in graph.stages}
    faster = graph.with_durations(less)
    for edge in graph.edges:
        if data.draw(st.booleans()):
            faster = faster.with_tokens(edge, edge.tokens + 1)
    assert period(faster).value <= period(graph).value
    serial = [s.name for s in graph.stages if s.serial]
    slow, quick = play(graph, 12), play(faster, 12)
    for name in serial:
        assert all(float(a) <= float(b) + 1e-9 for a, b in zip(quick.starts[name], slow.starts[name], strict=True))


@given(live_graphs(), st.builds(Fraction, st.integers(1, 40), st.integers(1, 6)))
@few
def test_a_schedule_exists_iff_the_period_is_long_enough(graph: TokenGraph, wanted: Fraction) -> None:
    found = earliest_starts(graph, wanted)
    if isinstance(found, tuple):
        assert wanted < period_of(graph)
        assert all(edge.dst == after.src for edge, after in zip(found, found[1:] + found[:1], strict=True))
        assert seconds_of(graph, list(found)) > wanted * tokens_of(list(found))
        return
    assert wanted >= period_of(graph)
    for edge in graph.closed:
        assert found[edge.dst] >= found[edge.src] + graph.stage(edge.src).exact - wanted * edge.tokens
    for name, start in found.items():  # the least: each is 0 or follows at once from another
        assert start >= 0
        assert start == 0 or any(
            edge.dst == name and start == found[edge.src] + graph.stage(edge.src).exact - wanted * edge.tokens
            for edge in graph.closed
        )


# --- by hand ------------------------------------------------------------------------------------------------------------


def test_a_training_loop_at_bounds_0_and_1() -> None:
    durations = {"rollout": 10, "reward": 2, "train": 6, "sync": 1}
    synchronous = period(loop(durations, 1))
    assert synchronous.value == 19
    assert [edge.src for edge in synchronous.cycle].index("reward") == [e.src for e in synchronous.cycle].index(
        "rollout"
    ) + 1
    assert synchronous.starts == {"rollout": 0, "reward": 10, "train": 12, "sync": 18}
    asynchronous = period(loop(durations, 2))
    assert asynchronous.value == 10
    assert [edge.src for edge in asynchronous.cycle] == ["rollout"]


def test_a_part_starts_no_later_than_the_parts_before_it_ask_for() -> None:
    for tokens, start in ((0, 4), (1, 0), (2, 0)):
        found = period(TokenGraph.of({"a": 4, "b": 3}, [TokenEdge("a", "b", tokens)]))
        assert found.starts == {"a": 0, "b": start}
        assert [part.period for part in found.components] == [4, 3]
        assert found.effective == {"a": 4, "b": 4}


def test_two_buffers_make_a_pair_of_stages_overlap() -> None:
    graph = TokenGraph.of({"a": 3, "b": 5}, [TokenEdge("a", "b", label="x")])
    assert [period(graph.with_credit("a", "b", c)).value for c in (1, 2, 3)] == [8, 5, 5]
    assert period(graph.with_credit("a", "b", 1).with_order(["a", "b"])).value == 8


def test_double_buffering_is_two_tokens_on_a_loop_of_ones_own() -> None:
    stage = TokenStage("copy", 6, serial=False)
    assert period(TokenGraph((stage,), (TokenEdge("copy", "copy", 2),))).value == 3
    assert period(TokenGraph((stage,))).value == 0
    assert period(TokenGraph((stage,))).cycle == ()


def test_the_empty_graph_and_stages_that_take_no_time() -> None:
    assert period(TokenGraph(())).value == 0
    found = period(loop({"a": 0, "b": 0}, 1))
    assert found.value == 0
    assert tokens_of(list(found.cycle)) == 1


def test_of_parallel_edges_the_poorest_counts() -> None:
    edges = [TokenEdge("a", "b"), TokenEdge("b", "a", 3), TokenEdge("b", "a", 1), TokenEdge("b", "a", 2)]
    found = period(TokenGraph.of({"a": 2, "b": 2}, edges))
    assert found.value == 4
    assert edges[2] in found.cycle


def test_durations_of_very_different_size_stay_exact() -> None:
    graph = loop({"a": 1e-9, "b": 1e9, "c": 0.1}, 1)
    assert period(graph).value == Fraction(1e-9) + Fraction(1e9) + Fraction(0.1)


def test_rates_are_refused_with_what_to_do() -> None:
    graph = TokenGraph.of({"a": 1, "b": 1}, [TokenEdge("a", "b", produces=2, consumes=2)])
    for analysis in (period, solve):
        with pytest.raises(ValueError, match="a -> b produces 2 and consumes 2: expand the graph"):
            analysis(graph)


def test_equal_cycles_everywhere_end_the_iteration_at_once() -> None:
    """A complete graph in which every cycle has ratio 1: nothing but ties."""
    edges = [Weighted(i, j, 1, 1) for i in range(12) for j in range(12)]
    found = howard(12, edges)
    assert (found.cost, found.tokens, found.rounds) == (found.tokens, found.cost, 1)


@given(st.integers(2, 7), st.randoms(use_true_random=False))
@few
def test_ties_with_zero_costs_and_one_edge_that_matters(nodes: int, random: object) -> None:
    edges = [Weighted(i, (i + 1) % nodes, 0, 1) for i in range(nodes)]
    edges += [Weighted(random.randrange(nodes), random.randrange(nodes), 0, 1) for _ in range(2 * nodes)]  # type: ignore[attr-defined]
    edges.append(Weighted(nodes - 1, 0, 1, 1))
    found = howard(nodes, edges)
    assert found.cost == 1
    assert sum(edges[i].tokens for i in found.cycle) == found.tokens
    assert all(
        found.potential[e.src] >= found.tokens * e.cost - found.cost * e.tokens + found.potential[e.dst] for e in edges
    )


# --- what a second and a token are worth --------------------------------------------------------------------------------


def test_the_worth_of_seconds_and_tokens_on_the_critical_cycle() -> None:
    graph = loop({"a": 4, "b": 5}, 1)
    found = solve(graph)
    assert found.period == pytest.approx(9)
    assert found.per_second == pytest.approx({"a": 1, "b": 1})
    assert found.per_token[1] == pytest.approx(-9)
    slower = solve(graph.with_tokens(graph.edges[1], 2))
    assert slower.period == pytest.approx(5)  # the next cycle: not 9 - 9
    assert slower.per_second == pytest.approx({"a": 0, "b": 1})


@given(live_graphs(connected=True))
@few
def test_the_worth_of_a_second_supports_the_period_as_a_function_of_durations(graph: TokenGraph) -> None:
    """The period is convex in the durations: it lies above its tangent, and one cycle's tokens share it out."""
    found = solve(graph)
    longest = max(stage.exact for stage in graph.stages)
    if not longest:
        return
    for stage in graph.stages:
        for change in (Fraction(1, 2), -stage.exact / 2, longest):
            moved = period_of(graph.with_durations({stage.name: stage.exact + change}))
            assert float(moved) >= found.period + found.per_second[stage.name] * float(change) - 1e-6
    worth = sum(found.per_second[stage.name] * float(stage.exact) for stage in graph.stages)
    assert worth == pytest.approx(found.period, abs=1e-6)
    spent = -sum(value * edge.tokens for value, edge in zip(found.per_token, graph.closed, strict=True))
    assert spent == pytest.approx(found.period, abs=1e-6)
