from __future__ import annotations

import pytest

from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenEdgeKind, TokenGraph, TokenStage, cycle_text
from rlflow.passes.analysis.tokens.liveness import empty_cycle

PAIR = TokenGraph.of({"rollout": 10, "train": 6}, [TokenEdge("rollout", "train", 1, "samples", 512, 2048, tag="here")])


def test_serial_stages_have_a_loop_with_one_token_and_others_have_none() -> None:
    graph = TokenGraph((TokenStage("a", 1), TokenStage("b", 1, serial=False)))
    assert [(e.src, e.dst, e.tokens, e.kind) for e in graph.closed] == [("a", "a", 1, TokenEdgeKind.SERIAL)]


def test_a_credit_edge_turns_rates_and_tokens_round_and_keeps_the_tag() -> None:
    credit = PAIR.with_credit("rollout", "train", 4096).edges[-1]
    assert (credit.src, credit.dst, credit.tokens) == ("train", "rollout", 4095)
    assert (credit.produces, credit.consumes, credit.kind, credit.tag) == (2048, 512, TokenEdgeKind.CREDIT, "here")
    assert credit.text == "train -> rollout (room for samples)"


def test_a_credit_edge_needs_one_edge_and_room_for_its_tokens() -> None:
    two = PAIR.with_edges(TokenEdge("rollout", "train", 0, "prompts"))
    with pytest.raises(ValueError, match="2 edges lead from `rollout` to `train`"):
        two.with_credit("rollout", "train", 4)
    assert two.with_credit("rollout", "train", 4, "prompts").edges[-1].tokens == 4
    with pytest.raises(ValueError, match="0 edges"):
        PAIR.with_credit("train", "rollout", 4)
    with pytest.raises(ValueError, match="starts with 1 tokens, more than its capacity of 0"):
        PAIR.with_credit("rollout", "train", 0)


def test_credits_are_not_bounded_again() -> None:
    graph = PAIR.with_credit("rollout", "train", 4096)
    with pytest.raises(ValueError, match="0 edges lead from `train` to `rollout`"):
        graph.with_credit("train", "rollout", 4096)


def test_an_order_is_a_cycle_with_one_token_into_its_first_stage() -> None:
    graph = TokenGraph.of({"a": 1, "b": 1, "c": 1}).with_order(["c", "a", "b"])
    assert [(e.src, e.dst, e.tokens) for e in graph.edges] == [("c", "a", 0), ("a", "b", 0), ("b", "c", 1)]
    assert [(e.src, e.dst, e.tokens) for e in TokenGraph.of({"a": 1}).with_order(["a"]).edges] == [("a", "a", 1)]
    for wrong in ([], ["a", "a"]):
        with pytest.raises(ValueError, match="an order needs stages"):
            graph.with_order(wrong)


def test_an_order_against_the_data_is_a_deadlock() -> None:
    graph = TokenGraph.of({"a": 1, "b": 1}, [TokenEdge("a", "b")])
    assert empty_cycle(graph.with_order(["a", "b"])) is None
    dead = empty_cycle(graph.with_order(["b", "a"]))
    assert dead is not None
    assert cycle_text(dead) in ("a -> b -> a", "b -> a -> b")


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="two stages are called `a`"):
        TokenGraph((TokenStage("b", 1), TokenStage("a", 1), TokenStage("a", 2)))
    with pytest.raises(ValueError, match="there is no stage `b`"):
        TokenGraph.of({"a": 1}, [TokenEdge("a", "b")])
    for seconds in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            TokenStage("a", seconds)
    with pytest.raises(ValueError, match="-1 tokens"):
        TokenEdge("a", "b", -1)
    with pytest.raises(ValueError, match="both are at least 1"):
        TokenEdge("a", "b", produces=0)
    with pytest.raises(KeyError):
        PAIR.with_durations({"reward": 1})


def test_changes_touch_one_of_two_equal_edges() -> None:
    edge = TokenEdge("a", "b")
    graph = TokenGraph.of({"a": 1, "b": 1}, [edge, edge])
    assert [e.tokens for e in graph.with_tokens(edge, 3).edges] == [3, 0]
    assert graph.without(edge).edges == (edge,)
    assert graph.with_durations({"b": 7}).stage("b").duration == 7
