from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_graphs import cycles, few, live_graphs, loop, period_of, rated_graphs

from rlflow.passes.analysis.tokens.bottleneck import bottleneck
from rlflow.passes.analysis.tokens.expand import expand
from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph
from rlflow.passes.analysis.tokens.liveness import deadlock
from rlflow.passes.analysis.tokens.period import period
from rlflow.passes.analysis.tokens.slack import common_slack, slack


def _longer(graph: TokenGraph, names: list[str], seconds: Fraction) -> TokenGraph:
    return graph.with_durations({name: graph.stage(name).exact + seconds for name in names})


def _bisected(graph: TokenGraph, names: list[str]) -> tuple[Fraction, Fraction]:
    """Bounds on the largest addition that keeps the period, from evaluating all cycles again and again."""
    wanted = period_of(graph)
    low, high = Fraction(0), Fraction(1)
    while period_of(_longer(graph, names, high)) <= wanted:
        high *= 2
    while high - low > Fraction(1, 10**6):
        middle = (low + high) / 2
        low, high = (middle, high) if period_of(_longer(graph, names, middle)) <= wanted else (low, middle)
    return low, high


@given(live_graphs(most=4))
@few
def test_slack_is_what_bisection_finds_and_not_a_bit_more(graph: TokenGraph) -> None:
    wanted = period_of(graph)
    limited = {edge.src for cycle in cycles(graph) for edge in cycle}
    for name, more in slack(graph).items():
        assert (more is None) == (name not in limited)
        if more is not None:
            low, high = _bisected(graph, [name])
            assert low <= more <= high
            assert period_of(_longer(graph, [name], more)) == wanted
            assert period_of(_longer(graph, [name], more + Fraction(1, 10**12))) > wanted


@given(live_graphs(most=4), st.data())
@few
def test_common_slack_is_what_bisection_finds(graph: TokenGraph, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from([s.name for s in graph.stages]), min_size=1, unique=True))
    more = common_slack(graph, names)
    if more is None:
        assert period_of(_longer(graph, names, Fraction(10**6))) == period_of(graph)
        return
    low, high = _bisected(graph, names)
    assert low <= more <= high
    assert period_of(_longer(graph, names, more + Fraction(1, 10**12))) > period_of(graph)


@given(rated_graphs(most=2, connected=True))
@few
def test_slack_of_a_stage_with_rates_is_that_of_its_copies(graph: TokenGraph) -> None:
    if deadlock(graph) is not None:
        return
    expanded = expand(graph)
    wanted = period(expanded.graph).value
    for name, copies in expanded.copies.items():
        more = common_slack(expanded.graph, copies)
        assert more is not None
        for addition, kept in ((more, True), (more + Fraction(1, 10**9), False)):
            slower = expand(_longer(graph, [name], addition)).graph
            assert (period(slower).value == wanted) == kept


def test_the_stages_beside_the_slowest_one() -> None:
    graph = loop({"rollout": 10, "reward": 2, "train": 6, "sync": 1}, 2)
    # Alone each may grow to 10, and the loop to 20.
    assert slack(graph) == {"rollout": 0, "reward": 1, "train": 1, "sync": 1}
    assert common_slack(graph, ["reward", "sync"]) == Fraction(1, 2)
    assert common_slack(graph, ["rollout", "sync"]) == 0
    assert common_slack(graph, []) is None
    with pytest.raises(KeyError):
        common_slack(graph, ["save"])


def test_what_sets_the_period_in_words() -> None:
    graph = loop({"rollout": 10, "train": 6}, 1)
    found = bottleneck(graph)
    assert found.text == "16 s per period: rollout (10 s) -> train (6 s) -> rollout, 16 s with 1 token"
    assert [(edge.text, seconds) for edge, seconds in found.one_more_token] == [
        ("rollout -> train", 10),
        ("train -> rollout", 10),
    ]
    assert found.without == (("rollout", 6), ("train", 10))
    relaxed = bottleneck(graph.with_tokens(graph.edges[1], 2))
    assert relaxed.text == "10 s per period: rollout (10 s) -> rollout, 10 s with 1 token"
    assert relaxed.one_more_token == ()  # a serial stage has no queue to deepen
    assert bottleneck(TokenGraph(())).text == "no cycle limits the period"


def test_a_token_on_one_of_two_equally_slow_cycles_brings_nothing() -> None:
    pairs = [("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")]
    graph = TokenGraph.of({"a": 2, "b": 3, "c": 3}, [TokenEdge(x, y, int(y == "a")) for x, y in pairs])
    found = bottleneck(graph)
    assert found.period == 5
    assert {seconds for _, seconds in found.one_more_token} == {5}


@given(live_graphs())
@few
def test_what_would_help_is_what_the_changed_graph_does(graph: TokenGraph) -> None:
    found = bottleneck(graph)
    for edge, seconds in found.one_more_token:
        assert seconds == period_of(graph.with_tokens(edge, edge.tokens + 1))
    for name, seconds in found.without:
        assert seconds == period_of(graph.with_durations({name: 0}))
