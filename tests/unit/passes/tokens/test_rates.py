from __future__ import annotations

from fractions import Fraction
from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_graphs import few, rated_graphs

from rlflow.passes.analysis.tokens.expand import expand
from rlflow.passes.analysis.tokens.game import play
from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph
from rlflow.passes.analysis.tokens.rates import Inconsistent, firings, repetition


def test_a_batch_of_samples() -> None:
    graph = TokenGraph.of(
        {"rollout": 1, "group": 1, "train": 1},
        [
            TokenEdge("rollout", "group", produces=1, consumes=16),
            TokenEdge("group", "train", produces=1, consumes=512),
            TokenEdge("train", "rollout", 8192, produces=8192, consumes=1),
        ],
    )
    assert repetition(graph) == {"rollout": 8192, "group": 512, "train": 1}


def test_every_part_has_its_own_smallest_numbers() -> None:
    graph = TokenGraph.of({"a": 1, "b": 1, "c": 1}, [TokenEdge("a", "b", produces=4, consumes=6)])
    assert repetition(graph) == {"a": 3, "b": 2, "c": 1}


def test_an_inconsistent_cycle_is_named() -> None:
    graph = TokenGraph.of(
        {"x": 1, "a": 1, "b": 1, "c": 1},
        [
            TokenEdge("x", "a"),
            TokenEdge("a", "b", produces=2),
            TokenEdge("c", "b", consumes=3),
            TokenEdge("a", "c"),
        ],
    )
    found = repetition(graph)
    assert isinstance(found, Inconsistent)
    assert {edge.text for edge, _ in found.walk} == {"a -> b", "c -> b", "a -> c"}
    assert found.gain in (Fraction(6), Fraction(1, 6))
    with pytest.raises(ValueError, match="rates that do not fit together"):
        firings(graph)


def test_a_self_loop_with_unequal_rates_is_inconsistent() -> None:
    found = repetition(TokenGraph.of({"a": 1}, [TokenEdge("a", "a", 1, produces=2)]))
    assert isinstance(found, Inconsistent)
    assert [edge.text for edge, _ in found.walk] == ["a -> a"]


@given(
    st.lists(st.tuples(*[st.sampled_from("abcd")] * 2, st.integers(1, 4), st.integers(1, 4)), max_size=6),
)
@few
def test_consistent_iff_the_rank_of_the_topology_matrix_is_stages_less_parts(
    edges: list[tuple[str, str, int, int]],
) -> None:
    graph = TokenGraph.of(
        dict.fromkeys("abcd", 1),
        [TokenEdge(src, dst, 0, "", produces, consumes) for src, dst, produces, consumes in edges],
    )
    gamma = np.zeros((len(edges) + 1, 4))
    for row, edge in enumerate(graph.edges):
        gamma[row, graph.index[edge.src]] += edge.produces
        gamma[row, graph.index[edge.dst]] -= edge.consumes
    nullity = 4 - np.linalg.matrix_rank(gamma)
    parts = {name: name for name in "abcd"}
    for edge in graph.edges:
        old, new = parts[edge.src], parts[edge.dst]
        parts = {name: new if part == old else part for name, part in parts.items()}
    found = repetition(graph)
    if isinstance(found, Inconsistent):
        assert nullity < len(set(parts.values()))
        _check_walk(found)
    else:
        assert nullity == len(set(parts.values()))
        assert not (gamma @ np.array([found[name] for name in "abcd"])).any()
        for part in set(parts.values()):
            assert gcd(*(found[name] for name in "abcd" if parts[name] == part)) == 1


def _check_walk(found: Inconsistent) -> None:
    product, at = Fraction(1), [edge.src if forward else edge.dst for edge, forward in found.walk]
    for i, (edge, forward) in enumerate(found.walk):
        assert (edge.dst if forward else edge.src) == at[(i + 1) % len(at)]
        ratio = Fraction(edge.produces, edge.consumes)
        product *= ratio if forward else 1 / ratio
    assert product == found.gain != 1


@given(rated_graphs())
@few
def test_the_expanded_graph_fires_at_the_same_times(graph: TokenGraph) -> None:
    expanded = expand(graph)
    assert expanded.graph.single_rate
    number = firings(graph)
    game, copies = play(graph, 4), play(expanded.graph, 4)
    for name, count in number.items():
        assert len(expanded.copies[name]) == count
        starts = game.starts[name]
        for i, copy in enumerate(expanded.copies[name]):
            assert copies.starts[copy] == starts[i::count]


def test_expansion_refuses_too_many_copies() -> None:
    graph = TokenGraph.of({"a": 1, "b": 1}, [TokenEdge("a", "b", consumes=1000)])
    with pytest.raises(ValueError, match="1001 firings per period are more than 1000"):
        expand(graph, limit=1000)
