"""Rank mappings against all permutations."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reshard_models import architectures, sides
from scipy.optimize import linear_sum_assignment

from rlflow.ir.flow import Layout
from rlflow.reshard import mapping
from rlflow.reshard.atoms import AtomClass, Part, atom_classes
from rlflow.reshard.catalogue import catalogue
from rlflow.reshard.endpoint import Fabric
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.mapping import map_ranks
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import Storage

quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@st.composite
def problems(draw):
    """Random classes of up to five ranks and devices, which overlap or not."""
    n = draw(st.integers(1, 5))
    source = draw(st.permutations(range(7)))[:n]
    target = draw(st.permutations(range(7)))[:n]
    ranks = st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True).map(lambda r: tuple(sorted(r)))
    sizes = st.lists(st.integers(1, 20), min_size=1, max_size=6)
    classes = [AtomClass(draw(ranks), draw(ranks), (Part(("w",), (((0, size),),)),)) for size in draw(sizes)]
    return classes, tuple(source), tuple(target)


def received(classes, source, devices):
    """Elements that each rank's device misses."""
    found = [0] * len(devices)
    for atoms in classes:
        for rank in atoms.needers:
            if devices[rank] not in {source[holder] for holder in atoms.holders}:
                found[rank] += atoms.elements
    return found


@quick
@given(problems())
def test_no_permutation_reuses_more(problem):
    classes, source, target = problem
    found = map_ranks(classes, source, target)
    assert sorted(found.devices) == sorted(target)
    need = sum(atoms.elements * len(atoms.needers) for atoms in classes)
    assert found.reused == need - sum(received(classes, source, found.devices))
    assert found.reused == need - min(sum(received(classes, source, p)) for p in permutations(target))
    if found.method == "given":
        assert found.devices == target


@quick
@given(problems())
def test_no_permutation_has_a_smaller_largest_receiver(problem):
    classes, source, target = problem
    found = received(classes, source, map_ranks(classes, source, target, objective="largest").devices)
    keys = [(max(r), sum(r)) for r in (received(classes, source, p) for p in permutations(target))]
    assert (max(found), sum(found)) == min(keys)


def test_the_two_objectives_differ():
    """Rank 0 needs a and c, rank 1 needs b; device 0 has a and b."""

    def part(size):
        return (Part(("w",), (((0, size),),)),)

    classes = [AtomClass((0,), (0,), part(5)), AtomClass((0,), (1,), part(6)), AtomClass((2,), (0,), part(4))]
    source, target = (0, 1, 2), (0, 1)
    assert map_ranks(classes, source, target).devices == (1, 0)  # reuses 6, rank 0 misses 9
    assert map_ranks(classes, source, target, objective="largest").devices == (0, 1)  # reuses 5, nobody misses over 6


@quick
@given(st.data())
def test_blocks_of_equal_ranks_do_not_lose_the_optimum(data):
    tensors = catalogue(data.draw(architectures()))
    (before, kept), (after, wanted) = data.draw(sides(tensors)), data.draw(sides(tensors))
    classes = atom_classes(Sharding(tensors, before, kept), Sharding(tensors, after, wanted))
    count = max(before.size, after.size)
    source, target = tuple(range(before.size)), tuple(range(count - after.size, count))
    found = map_ranks(classes, source, target)
    reuse = [[0] * len(target) for _ in target]
    for atoms in classes:
        holders = {source[h] for h in atoms.holders}
        for rank in atoms.needers:
            for column, device in enumerate(target):
                reuse[rank][column] += atoms.elements * (device in holders)
    rows, columns = linear_sum_assignment(reuse, maximize=True)
    assert found.reused == sum(reuse[r][c] for r, c in zip(rows, columns, strict=True))


@quick
@given(
    st.sampled_from(
        [
            (Layout(tp=4, dp=2), Layout(tp=2, dp=4)),
            (Layout(dp=8, zero=3), Layout(tp=2, dp=4)),
            (Layout(pp=2, tp=2, dp=2), Layout(tp=4, dp=2)),
        ]
    ),
    architectures(),
)
def test_groups_stay_on_one_node(layouts, architecture):
    tensors = catalogue(architecture)
    layers = tensors.layers
    before, after = layouts
    if before.pp == 2:
        before = replace(before, split=(layers // 2, layers - layers // 2))
    padded = Storage(vocabulary_multiple=4)
    classes = atom_classes(Sharding(tensors, before, padded), Sharding(tensors, after, padded))
    devices = tuple(range(8))
    fabric = Fabric.uniform(8, 4, 1e9, 1e9)
    found = map_ranks(classes, devices, devices, together=after.tp, fabric=fabric)
    assert sorted(found.devices) == list(devices)
    for first in range(0, 8, after.tp):
        assert len({fabric.node_of[d] for d in found.devices[first : first + after.tp]}) == 1
    assert found.reused <= map_ranks(classes, devices, devices).reused
    need = sum(atoms.elements * len(atoms.needers) for atoms in classes)
    assert found.reused == need - sum(received(classes, devices, found.devices))
    assert found.reused >= need - sum(received(classes, devices, devices))


def test_groups_that_do_not_fit_the_nodes():
    classes = [AtomClass((0,), (0,), (Part(("w",), (((0, 1),),)),))]
    with pytest.raises(ReshardError, match="node 0 has 3 devices, not a multiple of 2"):
        map_ranks(classes, (0, 1, 2), (0, 1, 2), together=2, fabric=Fabric.uniform(3, 3, 1.0, 1.0))
    with pytest.raises(ReshardError, match="needs the fabric"):
        map_ranks(classes, (0, 1), (0, 1), together=2)


@quick
@given(problems())
def test_above_the_limit_a_mapping_is_greedy_and_says_so(problem):
    classes, source, target = problem
    limit, mapping.ASSIGN_UP_TO = mapping.ASSIGN_UP_TO, 0
    try:
        found = map_ranks(classes, source, target)
        with pytest.raises(ReshardError, match="bottleneck"):
            map_ranks(classes, source, target, objective="largest")
    finally:
        mapping.ASSIGN_UP_TO = limit
    assert found.method == "greedy"
    assert sorted(found.devices) == sorted(target)
    assert sum(received(classes, source, found.devices)) <= sum(received(classes, source, target))
