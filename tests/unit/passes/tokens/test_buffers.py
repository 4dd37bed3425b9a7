from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_graphs import few, is_live, live_graphs, period_of, seconds_of, tokens_of

from rlflow.passes.analysis.tokens.buffers import PeriodError, check_capacity, minimal_buffers
from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph, credit_of
from rlflow.passes.analysis.tokens.liveness import DeadlockError


def _keeps(graph: TokenGraph, capacities: dict[TokenEdge, int], wanted: Fraction) -> bool:
    if any(capacity < edge.tokens for edge, capacity in capacities.items()):
        return False
    bounded = graph.with_edges(*(credit_of(edge, capacity) for edge, capacity in capacities.items()))
    return is_live(bounded) and period_of(bounded) <= wanted


@given(live_graphs(most=4), st.data())
@few
def test_minimal_buffers_equal_trying_all_sizes(graph: TokenGraph, data: st.DataObject) -> None:
    edges = list(dict.fromkeys(graph.edges))[:3]
    sizes = {edge: data.draw(st.integers(1, 5)) for edge in edges}
    wanted = period_of(graph) * data.draw(st.sampled_from([1, Fraction(7, 6), 2])) or Fraction(1)
    found = minimal_buffers(graph, sizes, wanted)
    assert _keeps(graph, dict(found.capacities), wanted)
    assert found.cost == sum(sizes[edge] * capacity for edge, capacity in found.capacities.items())
    # Rounding the relaxed sizes up is one way to do it: less than a token an edge above the lower bound.
    assert found.relaxed - 1e-6 <= found.cost < found.relaxed + sum(sizes.values()) + 1e-6
    cheaper = [range(max(1, edge.tokens), found.cost // sizes[edge] + 1) for edge in edges]
    for choice in product(*cheaper):
        if sum(sizes[edge] * c for edge, c in zip(edges, choice, strict=True)) < found.cost:
            assert not _keeps(graph, dict(zip(edges, choice, strict=True)), wanted)


@given(live_graphs(most=4), st.data())
@few
def test_a_check_of_capacities_names_a_cycle_that_is_too_slow(graph: TokenGraph, data: st.DataObject) -> None:
    capacities = {edge: edge.tokens + data.draw(st.integers(0, 2)) for edge in graph.edges}
    wanted = data.draw(st.builds(Fraction, st.integers(1, 20), st.integers(1, 3)))
    found = check_capacity(graph, capacities, wanted)
    assert (found is None) == _keeps(graph, capacities, wanted)
    if found is None:
        return
    bounded = graph.with_edges(*(credit_of(edge, capacity) for edge, capacity in capacities.items()))
    assert found.period == (period_of(bounded) if is_live(bounded) else None)
    cycle = list(found.cycle)
    assert all(edge in bounded.closed for edge in cycle)
    held = tokens_of(cycle) + found.missing
    assert held >= 1
    assert seconds_of(graph, cycle) <= wanted * held
    assert held == 1 or seconds_of(graph, cycle) > wanted * (held - 1)


def test_a_pair_of_stages_needs_two_places_to_overlap() -> None:
    graph = TokenGraph.of({"rollout": 10, "train": 6}, [TokenEdge("rollout", "train", label="samples")])
    samples = graph.edges[0]
    assert minimal_buffers(graph, {samples: 1}, Fraction(10)).capacities == {samples: 2}
    assert minimal_buffers(graph, {samples: 1}, Fraction(10)).relaxed == pytest.approx(1.6)
    assert minimal_buffers(graph, {samples: 1}, Fraction(16)).capacities == {samples: 1}
    short = check_capacity(graph, {samples: 1}, Fraction(10))
    assert short is not None
    assert (short.missing, short.period) == (1, 16)
    assert [edge.text for edge in short.cycle] in (
        ["rollout -> train (samples)", "train -> rollout (room for samples)"],
        ["train -> rollout (room for samples)", "rollout -> train (samples)"],
    )


def test_bytes_decide_where_the_room_is() -> None:
    """A reward at the side: its way round needs room on two edges, the direct one must hold what waits meanwhile."""
    edges = [TokenEdge("a", "b", label="x"), TokenEdge("b", "c", label="y"), TokenEdge("a", "c", label="z")]
    graph = TokenGraph.of({"a": 1, "b": 1, "c": 1}, edges)
    found = minimal_buffers(graph, {edges[0]: 100, edges[1]: 1, edges[2]: 10}, Fraction(1))
    assert found.capacities == {edges[0]: 2, edges[1]: 2, edges[2]: 3}
    assert found.cost == 232


def test_stages_that_take_no_time_still_need_a_place() -> None:
    graph = TokenGraph.of({"a": 0, "b": 0}, [TokenEdge("a", "b")])
    assert minimal_buffers(graph, {graph.edges[0]: 1}, Fraction(1)).capacities == {graph.edges[0]: 1}
    short = check_capacity(graph, {graph.edges[0]: 0}, Fraction(1))
    assert short is not None
    assert (short.missing, short.period) == (1, None)


def test_no_buffer_helps_a_stage_that_is_too_slow() -> None:
    graph = TokenGraph.of({"a": 3, "b": 5}, [TokenEdge("a", "b")])
    with pytest.raises(PeriodError, match="a period of 4 s is too short for b -> b"):
        minimal_buffers(graph, {graph.edges[0]: 1}, Fraction(4))
    assert minimal_buffers(graph, {}, Fraction(5)).cost == 0


def test_what_is_refused() -> None:
    graph = TokenGraph.of({"a": 3, "b": 5}, [TokenEdge("a", "b", 2)])
    edge = graph.edges[0]
    with pytest.raises(ValueError, match="is not positive"):
        minimal_buffers(graph, {edge: 1}, Fraction(0))
    with pytest.raises(ValueError, match="sizes are positive"):
        minimal_buffers(graph, {edge: 0}, Fraction(5))
    with pytest.raises(ValueError, match="not an edge of the graph"):
        minimal_buffers(graph, {TokenEdge("b", "a"): 1}, Fraction(5))
    with pytest.raises(ValueError, match="not an edge of the graph"):
        check_capacity(graph, {TokenEdge("b", "a"): 1}, Fraction(5))
    with pytest.raises(ValueError, match="starts with 2 tokens"):
        check_capacity(graph, {edge: 1}, Fraction(5))
    dead = graph.with_edges(TokenEdge("b", "b"))
    with pytest.raises(DeadlockError):
        minimal_buffers(dead, {edge: 1}, Fraction(5))


@pytest.mark.parametrize(("extra", "capacity"), [(-1, 2), (0, 2), (1, 3)])
def test_a_rounding_error_neither_costs_nor_saves_a_token(extra: int, capacity: int) -> None:
    """A way of 4 s and a hair more or less, in periods of 2 s: exact arithmetic decides, not a solver's tolerance."""
    durations = {"a": Fraction(1), "b": 1 + Fraction(extra, 10**12), "c": Fraction(2)}
    direct = TokenEdge("a", "c", label="direct")
    graph = TokenGraph.of(durations, [TokenEdge("a", "b"), TokenEdge("b", "c"), direct])
    assert minimal_buffers(graph, {direct: 1}, Fraction(2)).capacities == {direct: capacity}
