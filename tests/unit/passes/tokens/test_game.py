from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_graphs import few, live_graphs, loop, rated_graphs

from rlflow.passes.analysis.tokens.game import play
from rlflow.passes.analysis.tokens.graph import Seconds, TokenEdge, TokenGraph, TokenStage
from rlflow.passes.analysis.tokens.period import period
from rlflow.passes.analysis.tokens.rates import firings
from rlflow.passes.analysis.tokens.steady import steady_state


def _random_durations(graph: TokenGraph, seed: int, most: int = 40) -> dict[str, list[int]]:
    random = Random(seed)
    return {stage.name: [random.choice([0, 1, 2, 5]) for _ in range(most)] for stage in graph.stages}


@given(live_graphs(), st.integers(0, 2**32))
@few
def test_starts_are_the_maximum_over_the_inputs(graph: TokenGraph, seed: int) -> None:
    """start_v(k) = max over edges of the end of firing k - tokens of the source, ends in order: solved by repetition."""
    drawn = _random_durations(graph, seed)
    game = play(graph, 15, lambda name, k: drawn[name][k])
    starts = {stage.name: [0] * 15 for stage in graph.stages}
    ends = dict(starts)
    while True:
        ends = {name: [] for name in starts}  # type: ignore[misc]
        for name, times in starts.items():
            for k, start in enumerate(times):
                ends[name].append(max(start + drawn[name][k], ends[name][-1] if k else 0))
        after = {
            name: [
                max([0, *(ends[e.src][k - e.tokens] for e in graph.closed if e.dst == name and k >= e.tokens)])
                for k in range(15)
            ]
            for name in starts
        }
        if after == starts:
            break
        starts = after
    assert {name: list(times) for name, times in game.starts.items()} == starts
    assert {name: list(times) for name, times in game.ends.items()} == ends


@given(live_graphs(), st.integers(0, 2**32), st.data())
@few
def test_with_random_durations_shorter_or_more_tokens_is_never_later(
    graph: TokenGraph, seed: int, data: st.DataObject
) -> None:
    drawn = _random_durations(graph, seed)
    less = {name: [data.draw(st.sampled_from([1, 0.5])) * s for s in times] for name, times in drawn.items()}
    richer = graph
    for edge in graph.edges:
        richer = richer.with_tokens(edge, edge.tokens + data.draw(st.integers(0, 1)))
    slow = play(graph, 12, lambda name, k: drawn[name][k])
    quick = play(richer, 12, lambda name, k: less[name][k])
    for name, times in slow.starts.items():
        assert all(a <= b for a, b in zip(quick.starts[name], times, strict=True))


@given(rated_graphs(), st.integers(0, 2**32))
@few
def test_events_are_an_order_in_which_tokens_can_move(graph: TokenGraph, seed: int) -> None:
    drawn = _random_durations(graph, seed)
    game = play(graph, 3, lambda name, k: drawn[name][k])
    tokens = [edge.tokens for edge in graph.closed]
    counts = dict.fromkeys(graph.index, 0)
    now: Seconds = 0
    for event in game.events:
        assert event.time >= now
        now = event.time
        for i, edge in enumerate(graph.closed):
            if event.end and edge.src == event.stage:
                tokens[i] += edge.produces
            if not event.end and edge.dst == event.stage:
                tokens[i] -= edge.consumes
        assert min(tokens, default=0) >= 0
        counts[event.stage] += not event.end
    number = firings(graph)
    for name in game.stuck:
        assert counts[name] < 3 * number[name]
        assert any(e.dst == name and tokens[i] < e.consumes for i, e in enumerate(graph.closed))
    assert {name for name in counts if counts[name] < 3 * number[name]} == set(game.stuck)


def test_random_durations_are_slower_than_their_means() -> None:
    """Two parallel stages of 0 or 2 s, a join after both: the mean of the maximum is 1.5 s, not 1 s."""
    pairs = [("fork", "left"), ("fork", "right"), ("left", "join"), ("right", "join"), ("join", "fork")]
    graph = TokenGraph.of(
        {"fork": 1, "left": 1, "right": 1, "join": 1}, [TokenEdge(x, y, int(x == "join")) for x, y in pairs]
    )
    random = Random(0)
    steps = 4000
    game = play(graph, steps, lambda name, _: random.choice([0, 2]) if name in ("left", "right") else 1)
    mean = (game.starts["fork"][-1] - game.starts["fork"][0]) / (steps - 1)
    assert period(graph).value == 3
    assert mean == pytest.approx(3.5, abs=0.06)  # four standard errors: 0.87 / sqrt(4000) each


@given(live_graphs(most=4), st.integers(0, 2**32))
@few
def test_start_times_are_on_average_no_earlier_than_with_average_durations(graph: TokenGraph, seed: int) -> None:
    """Start times are convex in the durations; exact for the uniform choice among four plays."""
    drawn = [_random_durations(graph, seed + i) for i in range(4)]
    mean = {
        name: [Fraction(sum(times), 4) for times in zip(*(d[name] for d in drawn), strict=True)] for name in graph.index
    }
    games = [play(graph, 15, lambda name, k, d=d: d[name][k]) for d in drawn]  # type: ignore[misc]
    smooth = play(graph, 15, lambda name, k: mean[name][k])
    for name, times in smooth.starts.items():
        for k, start in enumerate(times):
            assert sum(game.starts[name][k] for game in games) >= 4 * start


def test_edges_keep_their_order_where_a_later_firing_is_quicker() -> None:
    graph = TokenGraph((TokenStage("a", 1, serial=False), TokenStage("b", 0)), (TokenEdge("a", "b"),))
    game = play(graph, 3, lambda name, k: [5, 1, 7][k] if name == "a" else 0)
    assert game.starts == {"a": (0, 0, 0), "b": (5, 5, 7)}


def test_a_deadlock_lists_who_is_stuck_and_the_rest_has_run() -> None:
    graph = TokenGraph.of({"a": 1, "b": 1, "c": 1}, [TokenEdge("a", "b"), TokenEdge("b", "a"), TokenEdge("b", "c", 1)])
    game = play(graph, 2)
    assert game.stuck == ("a", "b", "c")
    assert game.starts == {"a": (), "b": (), "c": (0,)}


def test_negative_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="firing 1 of `a` takes -1 s"):
        play(TokenGraph.of({"a": 1}), 2, lambda _, k: -k)


# --- the steady state -----------------------------------------------------------------------------------------------------


def test_a_loop_with_three_tokens_repeats_after_as_many_steps() -> None:
    graph = TokenGraph.of({"a": 4, "b": 3}, [TokenEdge("a", "b"), TokenEdge("b", "a", 2)])
    assert steady_state(graph).period == 4  # type: ignore[union-attr]
    three = TokenGraph((TokenStage("a", 7, serial=False),), (TokenEdge("a", "a", 3),))
    found = steady_state(three)
    assert found is not None
    assert (found.period, found.cyclicity) == (Fraction(7, 3), 3)


def test_a_play_that_is_too_short_or_stuck_has_no_steady_state() -> None:
    assert steady_state(loop({"a": 1, "b": 1}, 0)) is None
    # The slower of two cycles wins by one second in a thousand steps only.
    stages = (TokenStage("a", 1), TokenStage("b", 999), TokenStage("c", 1000, serial=False))
    edges = (TokenEdge("a", "b"), TokenEdge("b", "a", 1), TokenEdge("a", "c"), TokenEdge("c", "a", 2, "twice"))
    graph = TokenGraph(stages, edges)
    assert steady_state(graph, most=4) is None
    found = steady_state(graph)
    assert found is not None
    assert found.period == period(graph).value == 1000
    with pytest.raises(ValueError, match="not strongly connected"):
        steady_state(TokenGraph.of({"a": 1, "b": 1}))
