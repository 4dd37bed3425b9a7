from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_graphs import few, live_graphs, loop, period_of

from rlflow.passes.analysis.tokens.formulas import age_at, least_useful_bound, loop_period
from rlflow.passes.analysis.tokens.game import play
from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenEdgeKind, TokenGraph
from rlflow.passes.analysis.tokens.period import period
from rlflow.passes.analysis.tokens.staleness import least_useful_staleness, periods_by_staleness
from rlflow.passes.analysis.tokens.versions import ages, versions_used

SECONDS = {"rollout": 10, "reward": 2, "train": 6, "sync": 1}
WEIGHTS = TokenEdgeKind.WEIGHTS


def training(on_samples: int, on_scores: int, on_publish: int, on_weights: int) -> TokenGraph:
    return TokenGraph.of(
        {"prompts": 1, **SECONDS},
        [
            TokenEdge("prompts", "rollout"),
            TokenEdge("rollout", "reward", on_samples),
            TokenEdge("reward", "train", on_scores),
            TokenEdge("train", "sync", on_publish, kind=WEIGHTS),
            TokenEdge("sync", "rollout", on_weights, kind=WEIGHTS),
        ],
    )


# --- age ----------------------------------------------------------------------------------------------------------------


@given(st.tuples(*[st.integers(0, 3)] * 4).filter(any), st.integers(0, 2**32))
@few
def test_age_is_tokens_less_one_wherever_they_lie_and_however_long_stages_take(
    tokens: tuple[int, ...], seed: int
) -> None:
    random = Random(seed)
    graph = training(*tokens)
    played = versions_used(graph, "train", 25, duration=lambda name, _: random.choice([0, 0.5, 1, 7]))
    assert ages(played) == tuple(min(step, sum(tokens) - 1) for step in range(25))
    assert ages(played) == tuple(age_at(step, sum(tokens)) for step in range(25))
    newest = versions_used(graph, "train", 25, newest=True, duration=lambda name, _: random.choice([0, 0.5, 1, 7]))
    assert all(age is not None and 0 <= age <= sum(tokens) - 1 for age in ages(newest))


def test_with_the_newest_weights_samples_are_younger_where_rollout_is_the_slowest() -> None:
    graph = training(0, 0, 0, 3)
    assert set(ages(versions_used(graph, "train", 30))[5:]) == {2}
    assert set(ages(versions_used(graph, "train", 30, newest=True))[5:]) == {1}


def test_bound_0_is_on_policy() -> None:
    """No batch of a step starts before the version of the step before has been published."""
    graph = training(0, 0, 0, 1)
    for newest in (False, True):
        assert ages(versions_used(graph, "train", 12, newest=newest)) == (0,) * 12
    game = play(graph, 12)
    for step in range(11):
        assert game.starts["rollout"][step + 1] >= game.ends["sync"][step]


def test_prompts_fetched_ahead_have_no_version() -> None:
    graph = training(0, 0, 0, 1)
    ahead = graph.with_tokens(graph.edges[0], 3)
    assert ages(versions_used(ahead, "train", 6)) == (0,) * 6


def test_credits_carry_no_version_and_other_models_none_of_this_one() -> None:
    """An actor and a critic: each has its own weight edge, the queue of samples is bounded."""
    graph = TokenGraph.of(
        {"rollout": 3, "values": 1, "actor.train": 2, "critic.train": 2},
        [
            TokenEdge("rollout", "values", label="samples"),
            TokenEdge("values", "actor.train"),
            TokenEdge("values", "critic.train"),
            TokenEdge("actor.train", "rollout", 3, kind=WEIGHTS),
            TokenEdge("critic.train", "values", 2, kind=WEIGHTS),
        ],
    ).with_credit("rollout", "values", 2)
    assert ages(versions_used(graph, "actor.train", 9)) == (0, 1, 2, 2, 2, 2, 2, 2, 2)
    assert ages(versions_used(graph, "critic.train", 5)) == (0, 1, 1, 1, 1)


def test_a_batch_is_as_old_as_its_oldest_sample() -> None:
    """Four samples a batch, credits for six: the window of a batch and a half."""
    graph = TokenGraph.of(
        {"rollout": 1, "train": 1},
        [TokenEdge("rollout", "train", 0, "", 1, 4), TokenEdge("train", "rollout", 6, "", 4, 1, WEIGHTS)],
    )
    # Samples 1-6 are of version 0, 7-10 of 1, 11-14 of 2: batch 1 (5-8) starts with 0, batch 2 (9-12) with 1.
    assert versions_used(graph, "train", 4) == (0, 0, 1, 2)


def test_without_weight_edges_there_is_no_version_and_a_dead_graph_is_refused() -> None:
    graph = TokenGraph.of({"a": 1, "b": 1}, [TokenEdge("a", "b")])
    assert versions_used(graph, "b", 2) == (None, None)
    assert ages((None, 0)) == (None, 1)
    with pytest.raises(ValueError, match="deadlock: rollout, reward, train, sync"):
        versions_used(training(0, 0, 0, 0), "train", 2)
    with pytest.raises(KeyError):
        versions_used(graph, "train", 2)


# --- period against the bound ---------------------------------------------------------------------------------------------


def test_the_example_of_a_loop() -> None:
    assert [loop_period(list(SECONDS.values()), bound) for bound in range(4)] == [19, 10, 10, 10]
    assert least_useful_bound(list(SECONDS.values())) == 1
    assert [least_useful_bound(d) for d in ([5], [5, 5], [5, 5, 1], [0, 0], [0.5, 0.25])] == [0, 1, 2, 0, 1]


@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=5),
    st.integers(0, 4),
    st.data(),
)
@few
def test_the_formula_of_a_loop_is_the_largest_ratio_of_its_graph(
    durations: list[int], bound: int, data: st.DataObject
) -> None:
    limits = data.draw(
        st.lists(st.one_of(st.none(), st.integers(1, 6)), min_size=len(durations), max_size=len(durations))
    )
    names = [f"s{i}" for i in range(len(durations))]
    left = bound + 1
    edges = []
    for i in range(len(names)):  # tokens wherever there is room: the period does not depend on it
        here = left if i == len(names) - 1 else min(left, data.draw(st.integers(0, left)))
        limit = limits[i]
        here = here if limit is None else min(here, limit)
        left -= here
        edges.append(TokenEdge(names[i], names[(i + 1) % len(names)], here, label=f"e{i}"))
    if left:
        return  # no room behind the last stage
    graph = TokenGraph.of(dict(zip(names, durations, strict=True)), edges)
    for i, limit in enumerate(limits):
        if limit is not None:
            graph = graph.with_credit(names[i], names[(i + 1) % len(names)], limit, f"e{i}")
    full = None not in limits and sum(filter(None, limits)) == bound + 1
    if full:
        with pytest.raises(ValueError, match="nothing can move"):
            loop_period(durations, bound, limits)
    else:
        assert loop_period(durations, bound, limits) == period_of(graph)


def test_in_a_loop_of_full_buffers_the_free_places_set_the_pace() -> None:
    assert [loop_period([1, 1, 1], bound, [2, 2, 1]) for bound in range(4)] == [3, 2, 2, 3]
    assert loop_period([1, 1, 1], 3, [2, 2, None]) == 1
    with pytest.raises(ValueError, match="buffers for 5 tokens are full with 5: nothing can move"):
        loop_period([1, 1, 1], 4, [2, 2, 1])


def test_what_formulas_refuse() -> None:
    for wrong in (([], 0), ([1], -1), ([1, 1], 0, [1])):
        with pytest.raises(ValueError, match="not a loop"):
            loop_period(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs at least 1"):
        loop_period([1, 1], 0, [0, None])
    with pytest.raises(ValueError, match="at least one stage"):
        least_useful_bound([])
    with pytest.raises(ValueError, match="is dead"):
        age_at(1, 0)


def test_any_bound_is_useless_where_a_pools_order_closes_a_cycle_of_one_token() -> None:
    """Rollout and train share a pool in that order, the reward is elsewhere; one batch of shift opens the cycle."""
    edges = [TokenEdge("rollout", "reward"), TokenEdge("reward", "train"), TokenEdge("train", "rollout", kind=WEIGHTS)]
    graph = TokenGraph.of({"rollout": 10, "reward": 4, "train": 6}, edges)
    shared = graph.with_order(["rollout", "train"])
    assert periods_by_staleness(shared, edges[2:], range(3)) == {0: 20, 1: 20, 2: 20}
    assert least_useful_staleness(shared, edges[2:]) == 0
    # Bound 1 with its second token on the queue: the pool trains on the batch before while the reward judges this one.
    shifted = shared.with_tokens(edges[1], 1)
    assert period(shifted.with_tokens(edges[2], 1)).value == 16
    assert ages(versions_used(shifted.with_tokens(edges[2], 1), "train", 5)) == (0, 1, 1, 1, 1)


def test_a_model_with_two_readers_has_a_token_more_on_both_edges() -> None:
    edges = [
        TokenEdge("rollout", "old_logprobs"),
        TokenEdge("old_logprobs", "train"),
        TokenEdge("train", "rollout", kind=WEIGHTS),
        TokenEdge("train", "old_logprobs", kind=WEIGHTS),
    ]
    graph = TokenGraph.of({"rollout": 9, "old_logprobs": 3, "train": 4}, edges)
    assert periods_by_staleness(graph, edges[2:], [0, 1, 2]) == {0: 16, 1: 9, 2: 9}
    assert least_useful_staleness(graph, edges[2:]) == 1
    with pytest.raises(ValueError, match="negative"):
        periods_by_staleness(graph, edges[2:], [-1])


def test_stages_that_are_not_serial_gain_from_every_bound() -> None:
    graph = loop({"a": 4}, 1)
    edge = graph.edges[0]
    assert least_useful_staleness(graph, [edge]) == 0
    free = replace(graph, stages=(replace(graph.stages[0], serial=False),))
    assert periods_by_staleness(free, [edge], [0, 1, 3]) == {0: 4, 1: 2, 3: 1}
    assert least_useful_staleness(free, [edge]) is None


@given(live_graphs(most=4), st.data())
@few
def test_the_least_useful_bound_is_the_first_that_reaches_the_last_period(
    graph: TokenGraph, data: st.DataObject
) -> None:
    if not graph.edges:
        return
    chosen = data.draw(st.lists(st.sampled_from(range(len(graph.edges))), min_size=1, max_size=2, unique=True))
    edges = [graph.edges[i] for i in chosen]
    limited = graph
    for edge in edges:
        limited = limited.without(edge)
    limit = period_of(limited)
    found = least_useful_staleness(graph, edges)
    if found is None:
        assert limit == 0
        values = periods_by_staleness(graph, edges, [10, 1000]).values()
        assert len(set(values)) == 2
        return
    values = list(periods_by_staleness(graph, edges, range(found + 2)).values())
    assert values[found] == values[found + 1] == limit
    assert all(value > limit for value in values[:found])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
@few
def test_the_closed_form_is_the_bound_of_the_graph(durations: list[int]) -> None:
    graph = loop({f"s{i}": seconds for i, seconds in enumerate(durations)}, 1)
    assert least_useful_staleness(graph, graph.edges[-1:]) == least_useful_bound(durations)
    bound = least_useful_bound(durations)
    raised = graph.with_tokens(graph.edges[-1], bound + 1)
    assert period(raised).value == max(durations) == loop_period(durations, bound)
    assert bound == 0 or loop_period(durations, bound - 1) > max(durations)
    assert Fraction(sum(durations), bound + 1) <= max(durations)
