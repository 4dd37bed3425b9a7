"""Pools find room exactly when there is some."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_oracles import has_room

from rlflow.passes.search.devices import allocate, assign, pool_sizes, slots


@pytest.mark.parametrize(
    ("hosts", "sizes"),
    [
        ((8, 8), (1, 2, 4, 8, 16)),
        ((8, 8, 8), (1, 2, 4, 8, 16, 24)),
        ((1,), (1,)),
        ((6, 6), (1, 2, 4, 6, 12)),
        ((8, 4), (1, 2, 4, 8, 12)),
        ((3, 5, 5), (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 13)),
        ((), ()),
    ],
)
def test_sizes_are_powers_of_two_in_a_host_and_whole_hosts(hosts: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    assert pool_sizes(hosts) == sizes


@settings(max_examples=250, derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_room_is_found_when_there_is_room(sizes: list[int], hosts: list[int]) -> None:
    found = allocate(sizes, tuple(hosts))
    assert (found is not None) == has_room(sizes, hosts)
    if found is None:
        return
    taken: set[tuple[int, int]] = set()
    for size, start in zip(sizes, found, strict=True):
        runs = list(slots(start, size, hosts))
        mine = {(host, first + i) for host, first, count in runs for i in range(count)}
        assert len(mine) == size
        assert not mine & taken
        taken |= mine
        assert all(0 <= device < hosts[host] for host, device in mine)
        if len(runs) > 1:
            assert start.device == 0
            assert [host for host, _, _ in runs] == list(range(start.host, start.host + len(runs)))
            assert all(count == hosts[host] for host, _, count in runs[:-1])


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=3), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_smaller_pools_find_room_too(sizes: list[int], hosts: list[int]) -> None:
    if allocate(sizes, tuple(hosts)) is not None:
        for i in range(len(sizes)):
            assert allocate([size - (j == i) for j, size in enumerate(sizes)], tuple(hosts)) is not None


def test_two_pools_of_twelve_do_not_fit_on_three_hosts_of_eight() -> None:
    """24 devices are enough in number, but both would start on a host of their own and run into a second one."""
    assert allocate([12, 12], (8, 8, 8)) is None
    assert allocate([12, 4, 8], (8, 8, 8)) is not None
    assert allocate([12, 12], (8, 8, 8, 8)) is not None


def test_of_several_orders_the_one_that_ends_earliest_goes_on() -> None:
    """9 devices take the first three hosts but one device, 7 take the fourth and one of the fifth: all are full but one."""
    assert allocate([1, 7, 4, 9], (1, 1, 8, 6, 5)) is not None


def test_many_hosts() -> None:
    found = allocate([4096, 2048, 4, 2, 1, 1], (8,) * 769)
    assert found is not None
    assert [(place.host, place.device) for place in found] == [(0, 0), (512, 0), (768, 0), (768, 4), (768, 6), (768, 7)]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.lists(st.lists(st.none() | st.integers(1, 9), min_size=2, max_size=2), min_size=1, max_size=4),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.lists(st.integers(1, 6), min_size=0, max_size=3),
)
def test_types_are_assigned_with_the_fewest_devices(
    wanted: list[list[int | None]], first: list[int], second: list[int]
) -> None:
    best = math.inf
    for kinds in product((0, 1), repeat=len(wanted)):
        sizes = [row[kind] for row, kind in zip(wanted, kinds, strict=True)]
        if all(size is not None for size in sizes):
            mine = [[s for s, k in zip(sizes, kinds, strict=True) if k == kind and s is not None] for kind in (0, 1)]
            if has_room(mine[0], first) and has_room(mine[1], second):
                best = min(best, sum(mine[0]) + sum(mine[1]))
    found = assign(wanted, [tuple(first), tuple(second)])
    assert (found is None) == (best == math.inf)
    if found is not None:
        assert sum(row[kind] or 0 for row, kind in zip(wanted, found, strict=True)) == best
