from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_graphs import cycles, few, graphs, is_live, live_graphs, rated_graphs, reachable, tokens_of

from rlflow.passes.analysis.tokens.bounds import max_tokens, unbounded_edges
from rlflow.passes.analysis.tokens.game import play
from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenEdgeKind, TokenGraph, TokenStage, cycle_text
from rlflow.passes.analysis.tokens.liveness import DeadlockError, deadlock, empty_cycle, replay
from rlflow.passes.analysis.tokens.period import period
from rlflow.passes.analysis.tokens.rates import firings


def _training(tokens: int) -> TokenGraph:
    return TokenGraph.of(
        {"rollout": 10, "reward": 2, "train": 6},
        [
            TokenEdge("rollout", "reward", label="samples"),
            TokenEdge("reward", "train", label="scores"),
            TokenEdge("train", "rollout", tokens, "weights of actor", kind=TokenEdgeKind.WEIGHTS, tag=(12, 3)),
        ],
    )


def test_training_without_a_token_on_the_weight_edge_waits_for_itself() -> None:
    cycle = empty_cycle(_training(0))
    assert cycle is not None
    assert cycle_text(cycle) == "rollout -> reward -> train -> rollout"
    assert cycle[-1].tag == (12, 3)
    found = deadlock(_training(0))
    assert found is not None
    assert found.cycle == cycle
    assert found.fired == {"rollout": 0, "reward": 0, "train": 0}
    assert found.text == (
        "rollout -> reward -> train -> rollout: reward waits on rollout -> reward (samples); "
        "train waits on reward -> train (scores); rollout waits on train -> rollout (weights of actor)"
    )
    with pytest.raises(DeadlockError, match="a cycle without tokens: rollout -> reward -> train -> rollout"):
        period(_training(0))
    assert empty_cycle(_training(1)) is None
    assert deadlock(_training(1)) is None


def test_stages_that_take_no_time_deadlock_as_well() -> None:
    graph = TokenGraph.of({"a": 0, "b": 0}, [TokenEdge("a", "b"), TokenEdge("b", "a")])
    assert empty_cycle(graph) is not None
    with pytest.raises(DeadlockError):
        period(graph)


def test_who_only_waits_for_the_cycle_is_blocked_but_not_on_it() -> None:
    graph = _training(0)
    graph = TokenGraph(
        (*graph.stages, TokenStage("save", 1), TokenStage("load", 1)), (*graph.edges, TokenEdge("train", "save"))
    )
    found = deadlock(graph)
    assert found is not None
    assert found.blocked == ("rollout", "reward", "train", "save")
    assert {edge.src for edge in found.cycle} == {"rollout", "reward", "train"}


def test_the_shortest_of_several_is_named_and_a_single_empty_loop_beats_all() -> None:
    edges = [TokenEdge("a", "b"), TokenEdge("b", "c"), TokenEdge("c", "a"), TokenEdge("c", "b")]
    graph = TokenGraph.of({"a": 1, "b": 1, "c": 1}, edges)
    assert empty_cycle(graph) == (edges[1], edges[3])
    loop = TokenEdge("c", "c")
    assert empty_cycle(graph.with_edges(loop)) == (loop,)


def test_rates_can_starve_a_cycle_that_holds_tokens() -> None:
    edges = [TokenEdge("a", "b", 0, "x", 2, 3), TokenEdge("b", "a", 3, "y", 3, 2)]
    graph = TokenGraph.of({"a": 1, "b": 1}, edges)
    assert empty_cycle(graph) is None
    found = deadlock(graph)
    assert found is not None
    assert found.fired == {"a": 1, "b": 0}
    assert found.text == "a -> b -> a: b waits for 3 on a -> b (x); a waits for 2 on b -> a (y)"
    assert replay(graph, found).tokens == (2, 1)
    assert deadlock(graph.with_tokens(edges[1], 4)) is None


@given(graphs())
@few
def test_every_empty_cycle_has_a_certificate_that_replays(graph: TokenGraph) -> None:
    cycle = empty_cycle(graph)
    found = deadlock(graph)
    assert (cycle is None) == (found is None) == is_live(graph)
    assert bool(play(graph, 3).stuck) == (cycle is not None)
    if cycle is None or found is None:
        return
    assert len(cycle) == min(len(c) for c in cycles(graph) if not tokens_of(c))
    for certificate in (cycle, found.cycle):
        assert all(edge in graph.closed and not edge.tokens for edge in certificate)
        assert all(
            edge.dst == after.src for edge, after in zip(certificate, certificate[1:] + certificate[:1], strict=True)
        )
        shown = replay(graph, certificate, periods=5)
        assert shown.stuck
        assert not any(shown.fired[edge.src] for edge in certificate)


@given(rated_graphs())
@few
def test_with_rates_live_iff_some_order_completes_a_period(graph: TokenGraph) -> None:
    most = [max(counts) for counts in zip(*reachable(graph), strict=True)]
    number = firings(graph)
    stopped = tuple(s.name for s, count in zip(graph.stages, most, strict=True) if count < number[s.name])
    found = deadlock(graph)
    assert (() if found is None else found.blocked) == stopped
    assert bool(play(graph, 2).stuck) == bool(stopped)
    if found is not None:
        assert found.fired == {edge.src: most[graph.index[edge.src]] for edge in found.cycle}
        shown = replay(graph, found, periods=3)
        assert shown.stuck
        assert {edge.src: shown.fired[edge.src] for edge in found.cycle} == found.fired


@given(live_graphs())
@few
def test_live_graphs_never_deadlock(graph: TokenGraph) -> None:
    assert deadlock(graph) is None
    game = play(graph, 20)
    assert not game.stuck
    assert all(len(times) == 20 for times in game.ends.values())


def test_a_replay_shows_that_a_wrong_certificate_is_wrong() -> None:
    graph = _training(1)
    assert not replay(graph, graph.edges).stuck
    with pytest.raises(ValueError, match="not a cycle"):
        replay(graph, graph.edges[:2])


# --- how many tokens an edge can hold -------------------------------------------------------------------------------


@given(live_graphs(most=4))
@few
def test_the_bound_is_the_most_that_any_order_of_firings_reaches(graph: TokenGraph) -> None:
    markings = list(reachable(graph, periods=4).values())
    poorest: dict[tuple[str, str], int] = {}
    for cycle in cycles(graph):
        for edge in cycle:
            pair = (edge.src, edge.dst)
            poorest[pair] = min(poorest.get(pair, tokens_of(cycle)), tokens_of(cycle))
    for number, edge in enumerate(graph.closed):
        limit = max_tokens(graph, edge)
        reached = max(marking[number] for marking in markings)
        if limit is None:
            assert edge in unbounded_edges(graph)
            assert (edge.src, edge.dst) not in poorest
        else:
            assert edge not in unbounded_edges(graph)
            least = min(e.tokens for e in graph.closed if (e.src, e.dst) == (edge.src, edge.dst))
            assert limit == poorest[edge.src, edge.dst] + edge.tokens - least
            # Four firings of each stage move at least four tokens to the edge.
            assert reached == limit if limit <= 4 else reached <= limit


@given(live_graphs(connected=True), st.integers(0, 2**32))
@few
def test_no_more_items_than_the_bound_are_made_waiting_or_taken(graph: TokenGraph, seed: int) -> None:
    random = Random(seed)
    game = play(graph, 15, lambda name, k: random.choice([0, 1, 5]))
    limits = [max_tokens(graph, edge) for edge in graph.closed]
    under_way = [edge.tokens for edge in graph.closed]
    for event in game.events:
        for i, edge in enumerate(graph.closed):
            under_way[i] += (edge.src == event.stage and not event.end) - (edge.dst == event.stage and event.end)
            limit = limits[i]
            assert edge.src == edge.dst or limit is None or under_way[i] <= limit


@given(rated_graphs(connected=True))
@few
def test_with_rates_no_order_of_firings_passes_the_bound(graph: TokenGraph) -> None:
    if empty_cycle(graph) is not None:
        return
    markings = list(reachable(graph, periods=2).values())
    for number, edge in enumerate(graph.closed):
        limit = max_tokens(graph, edge)
        assert limit is not None
        assert max(marking[number] for marking in markings) <= limit


def test_a_queue_is_bounded_by_its_credits_and_an_engine_by_the_loop() -> None:
    graph = _training(11)
    samples = graph.edges[0]
    assert max_tokens(graph, samples) == 11  # more than an engine that takes ten at once would accept
    assert max_tokens(graph.with_credit("rollout", "reward", 10), samples) == 10
    assert unbounded_edges(graph) == ()
    open_ended = graph.without(graph.edges[2])
    assert unbounded_edges(open_ended) == open_ended.edges
    assert max_tokens(open_ended, samples) is None
    with pytest.raises(ValueError, match="not an edge of the graph"):
        max_tokens(graph, TokenEdge("train", "reward"))


def test_tokens_of_other_rates_are_counted_in_shares() -> None:
    graph = TokenGraph.of(
        {"rollout": 1, "train": Fraction(1, 2)},
        [TokenEdge("rollout", "train", 0, "samples", 1, 8), TokenEdge("train", "rollout", 16, "credits", 8, 1)],
    )
    assert max_tokens(graph, graph.edges[0]) == 16
    assert deadlock(graph) is None
    assert deadlock(graph.with_tokens(graph.edges[1], 7)) is not None
