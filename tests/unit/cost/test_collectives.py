"""Collectives against hand-worked numbers, a step-by-step ring, and bounds."""

from __future__ import annotations

from math import inf, isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.cost import collectives as c
from rlflow.cost.errors import UnknownFactError
from rlflow.cost.groups import Group, Network
from rlflow.cost.machine import Link

quick = settings(max_examples=60, derandomize=True, deadline=None)
LINK = Link(100e9, 10e-6)
SIZES = st.floats(1, 1e11)


def test_by_hand():
    """8 ranks, 800 MB at 100 GB/s and 10 microseconds."""
    assert c.ring_all_reduce(8, 800e6, LINK) == pytest.approx(14 * 10e-6 + 2 * 7 / 8 * 8e-3)
    assert c.all_gather(8, 800e6, LINK) == c.reduce_scatter(8, 800e6, LINK) == pytest.approx(7 * 10e-6 + 7 / 8 * 8e-3)
    assert c.tree_all_reduce(8, 800e6, LINK) == pytest.approx(6 * 10e-6 + 16e-3)
    assert c.chain_broadcast(8, 800e6, LINK, 4) == pytest.approx(10 * (10e-6 + 2e-3))
    assert c.all_to_all(8, 800e6, LINK) == pytest.approx(7 * 10e-6 + 7 / 8 * 8e-3)
    assert c.point_to_point(800e6, LINK) == pytest.approx(10e-6 + 8e-3)


def test_alone_costs_nothing(make_machine):
    alone = [f(1, 1e9, LINK) for f in (c.ring_all_reduce, c.all_gather, c.tree_all_reduce, c.all_to_all)]
    group, machine = Group(1), make_machine("a100", 1, 8)
    assert alone == [0.0] * 4
    assert c.chain_broadcast(1, 1e9, LINK, 3) == 0.0
    assert group.all_reduce(1e9, machine) == group.all_gather(1e9, machine) == group.all_to_all(1e9, machine) == 0.0


@given(st.integers(2, 12), st.integers(1, 20), SIZES)
@quick
def test_chain_broadcast_step_by_step(n, chunks, size):
    """A rank forwards a chunk when it has it and the one before is gone."""
    each = LINK.latency_s + size / chunks / LINK.bytes_per_s
    has = [[0.0] * chunks, *([inf] * chunks for _ in range(n - 1))]
    for rank in range(1, n):
        free = 0.0
        for chunk in range(chunks):
            free = max(free, has[rank - 1][chunk]) + each
            has[rank][chunk] = free
    assert c.chain_broadcast(n, size, LINK, chunks) == pytest.approx(has[-1][-1])


@given(st.integers(2, 64), st.floats(1e3, 1e9))
@quick
def test_best_chunks_is_best(n, size):
    best = c.best_chunks(n, size, LINK)
    at = c.chain_broadcast(n, size, LINK, best)
    assert all(at <= c.chain_broadcast(n, size, LINK, q) * (1 + 1e-12) for q in range(1, 4 * best + 10))


@given(st.integers(2, 512), SIZES)
@quick
def test_bounds_of_an_all_reduce(n, size):
    """No all-reduce beats 2 (n - 1)/n of the bytes, nor log2 n steps (Patarasuk, Yuan 2009)."""
    for seconds in (c.ring_all_reduce(n, size, LINK), c.tree_all_reduce(n, size, LINK)):
        assert seconds >= 2 * (n - 1) / n * size / LINK.bytes_per_s * (1 - 1e-12)
        assert seconds >= (n - 1).bit_length() * LINK.latency_s


def test_levels(make_machine):
    """Groups of a mesh over hosts of 8: where their ranks meet."""
    machine = make_machine("h100", 4, 8)
    assert [n for n, _ in Group(8).levels(machine)] == [8]
    assert [n for n, _ in Group(16).levels(machine)] == [8, 2]
    assert [n for n, _ in Group(4, 8).levels(machine)] == [4]
    assert Group(4, 8).levels(machine)[0][1] == machine.link_across()
    assert [n for n, _ in Group(8, 4).levels(machine)] == [2, 4]
    assert [n for n, _ in Group(2, 4).levels(machine)] == [2]
    assert [n for n, _ in Group(12).levels(machine)] == [6, 2]
    assert [n for n, _ in Group(32).levels(make_machine("ascend_910c", 2, 16, "s"))] == [32]
    assert [n for n, _ in Group(32).levels(make_machine("ascend_910c", 2, 16))] == [16, 2]


def test_hierarchical_by_hand(make_machine):
    """RS inside + AR across of an eighth + AG inside, on 4 hosts of 8 H100."""
    machine, size = make_machine("h100", 4, 8), 8e9
    inside, across = machine.link_inside(), machine.link_across()
    expected = 2 * c.all_gather(8, size, inside) + c.ring_all_reduce(4, size / 8, across)
    assert Group(32).all_reduce(size, machine) == pytest.approx(expected)
    assert expected < c.ring_all_reduce(32, size, across)


def test_exchange_over_two_networks(make_machine):
    """16 experts' ranks on 2 hosts: 8/16 of the bytes leave the host, and half of those with deduplication."""
    machine, size = make_machine("h100", 2, 8), 16e9
    across = machine.link_across()
    assert Group(16).all_to_all(size, machine) == pytest.approx(across.latency_s + 8e9 / across.bytes_per_s)
    assert Group(16).all_to_all(size, machine, 0.5) == pytest.approx(across.latency_s + 4e9 / across.bytes_per_s)
    inside = machine.link_inside()
    assert Group(8).all_to_all(size, machine) == pytest.approx(c.all_to_all(8, size, inside))
    assert Group(4, 8).all_to_all(size, make_machine("h100", 4, 8)) == pytest.approx(c.all_to_all(4, size, across))


def test_full_mesh_gives_a_small_group_few_links(make_machine):
    """Atlas 800T A2: 28 GB/s to every neighbour, 196 to all of them."""
    machine = make_machine("ascend_910b", 1, 8)
    rates = {n: Group(n).levels(machine)[0][1].bytes_per_s for n in (2, 4, 8)}
    assert rates[2] * 3 == pytest.approx(rates[4])
    assert rates[2] * 7 == pytest.approx(rates[8])


def test_a_missing_link_is_named(make_machine):
    machine = make_machine("h20", 2, 8)
    assert Group(8).all_reduce(1e6, machine) > 0
    with pytest.raises(UnknownFactError, match="`h20` has no fact `scaleout_bytes_per_s`"):
        Group(16).all_reduce(1e6, machine)


@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 32]), st.sampled_from([1, 2, 4, 8]), SIZES)
@quick
def test_groups_have_all_their_ranks(n, stride, size):
    from rlflow.cluster.spec import Cluster, Host
    from rlflow.cost.machine import machine

    here = machine(Cluster("c", tuple(Host(f"h{i}", "h100", 8) for i in range(32))))
    group, total = Group(n, stride), 1
    for size_of_level, _ in group.levels(here):
        total *= size_of_level
    assert total == n
    assert isclose(group.all_gather(2 * size, here) - group.all_gather(size, here),
                   group.all_gather(3 * size, here) - group.all_gather(2 * size, here), rel_tol=1e-6)  # fmt: skip


def test_networks():
    ways = Network(((1.0, 2.0), (3.0, 1.0)))
    assert (ways.fastest(1), ways.slowest(1), ways.fastest(5), ways.slowest(5)) == (3, 4, 8, 11)
    assert ways.scaled(2).fastest(1) == ways.fastest(2)
    assert Network().fastest(9) == Network().slowest(9) == ways.fastest(0) == 0
