"""Partitions: all, each once, and only those that the pins allow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_oracles import set_partitions

from rlflow.passes.search.partitions import Part, Partition, Rules, partitions

BELL = (1, 2, 5, 15, 52, 203, 877)


def blocks(partition: Partition) -> tuple[tuple[int, ...], ...]:
    return tuple(part.stages for part in partition)


@pytest.mark.parametrize(("stages", "number"), list(enumerate(BELL, start=1)))
def test_there_are_bell_numbers_of_them_and_none_twice(stages: int, number: int) -> None:
    found = [blocks(p) for p in partitions(stages, Rules())]
    assert len(found) == len(set(found)) == number
    assert {frozenset(p) for p in found} == {frozenset(p) for p in set_partitions(stages)}
    assert found == [blocks(p) for p in partitions(stages, Rules())]


groups = st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=3, unique=True), max_size=2)


@settings(max_examples=80, derandomize=True, deadline=None)
@given(st.dictionaries(st.integers(0, 4), st.sampled_from("xy"), max_size=4), groups, groups)
def test_pins_leave_what_agrees_with_them(
    homes: dict[int, str], together: list[list[int]], apart: list[list[int]]
) -> None:
    disjoint = [g for g in together if not any(set(g) & set(o) for o in together if o is not g)]
    rules = Rules(
        homes=homes,
        together=tuple(map(tuple, disjoint)),
        apart=tuple(map(tuple, apart)),
        declared={"x": None, "y": None},
    )

    def agrees(partition: Sequence[Sequence[int]]) -> bool:
        at = {stage: number for number, block in enumerate(partition) for stage in block}
        pinned: dict[str, set[int]] = {}
        for stage, home in homes.items():
            pinned.setdefault(home, set()).add(at[stage])
        once = all(len(places) == 1 for places in pinned.values())
        return (
            once
            and len({next(iter(p)) for p in pinned.values()}) == len(pinned)
            and all(len({at[s] for s in g}) == 1 for g in disjoint)
            and all(len({at[s] for s in g}) == len(g) for g in apart)
        )

    found = list(partitions(5, rules))
    assert {frozenset(blocks(p)) for p in found} == {frozenset(p) for p in set_partitions(5) if agrees(p)}
    for partition in found:
        for part in partition:
            assert {homes[s] for s in part.stages if s in homes} <= {part.pool}


def test_a_whole_branch_is_pruned() -> None:
    asked: list[tuple[tuple[int, ...], ...]] = []

    def prune(parts: Sequence[Part]) -> bool:
        asked.append(tuple(part.stages for part in parts))
        return any(len(part.stages) > 1 for part in parts)

    assert [blocks(p) for p in partitions(6, Rules(), prune)] == [((0,), (1,), (2,), (3,), (4,), (5,))]
    assert len(asked) == 6 + 15  # one that goes on and, for stage i, i that join one of the others


def test_a_declared_pool_without_stages_may_take_any() -> None:
    rules = Rules(homes={0: "learner"}, declared={"learner": None, "big": 64})
    found = [tuple((p.stages, p.pool) for p in partition) for partition in partitions(2, rules)]
    assert found == [
        (((0, 1), "learner"),),
        (((0,), "learner"), ((1,), None)),
        (((0,), "learner"), ((1,), "big")),
    ]


def test_equal_declared_pools_are_given_out_in_order() -> None:
    rules = Rules(declared={"first": 8, "second": 8})
    found = [tuple((p.stages, p.pool) for p in partition) for partition in partitions(2, rules)]
    assert found == [
        (((0, 1), None),),
        (((0, 1), "first"),),
        (((0,), None), ((1,), None)),
        (((0,), None), ((1,), "first")),
        (((0,), "first"), ((1,), None)),
        (((0,), "first"), ((1,), "second")),
    ]


def test_without_further_pools_every_stage_is_on_a_declared_one() -> None:
    rules = Rules(homes={0: "learner"}, declared={"learner": None, "rollout": None}, only_declared=True)
    found = list(partitions(3, rules))
    assert all(part.pool is not None for partition in found for part in partition)
    assert max(map(len, found)) == 2
    assert len(found) == 4  # with or without each of the two others


def test_stages_that_are_alike_do_not_make_new_plans() -> None:
    found = [blocks(p) for p in partitions(3, Rules(alike=((1, 2),)))]
    assert found == [((0, 1, 2),), ((0, 1), (2,)), ((0,), (1, 2)), ((0,), (1,), (2,))]


def test_a_home_must_be_declared() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        list(partitions(2, Rules(homes={0: "nowhere"})))
