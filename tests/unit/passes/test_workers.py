"""CPUs of hosts: the sum that a plan asks for, and where its Python workers go."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.passes.analysis.host_cpus import DRIVER, QUEUES, RANKS, Demand
from rlflow.passes.analysis.workers import spread


def demand(name: str, cpus: int | None, asked: int) -> Demand:
    return Demand(name, cpus, ((RANKS, asked),) if asked else ())


@pytest.mark.parametrize(
    ("parts", "words", "total"),
    [
        ((), "0", 0),
        (((RANKS, 1),), "1 rank x 1 = 1", 1),
        (((RANKS, 8), (QUEUES, 2), (DRIVER, 1)), "8 ranks x 1 + 2 queues x 1 + driver 1 = 11", 11),
    ],
)
def test_the_sum_in_words(parts: tuple[tuple[str, int], ...], words: str, total: int) -> None:
    found = Demand("h", 16, parts)
    assert (found.words, found.total, found.left) == (words, total, 16 - total)
    assert Demand("h", None, parts).left is None


hosts = st.lists(st.tuples(st.none() | st.integers(0, 6), st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=6)


@given(hosts, st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_tiers_are_filled_in_order_and_evenly(made: list[tuple[int | None, int, int]], workers: int) -> None:
    found = {f"h{i}": demand(f"h{i}", cpus, asked) for i, (cpus, asked, _) in enumerate(made)}
    tiers = [[f"h{i}" for i, (*_, tier) in enumerate(made) if tier == wanted] for wanted in range(3)]
    room = {f"h{i}": workers if cpus is None else max(0, cpus - asked) for i, (cpus, asked, _) in enumerate(made)}
    placed = spread(workers, tiers, found)
    if placed is None:
        assert sum(room.values()) < workers
        return
    assert len(placed) == workers
    count = {host: placed.count(host) for host in found}
    assert all(count[host] <= room[host] for host in found)
    for earlier, later in ((0, 1), (0, 2), (1, 2)):
        if any(count[host] for host in tiers[later]):
            assert all(count[host] == room[host] for host in tiers[earlier])
    for tier in tiers:
        for host in tier:
            if count[host] < room[host]:  # it could have had more: no other host of the tier has two more than it
                assert all(count[other] <= count[host] + 1 for other in tier)


def test_equal_hosts_are_filled_in_the_order_of_the_cluster() -> None:
    found = {name: demand(name, 4, 1) for name in ("b", "a")}
    assert spread(3, [["b", "a"]], found) == ("b", "b", "a")
    assert spread(7, [["b", "a"]], found) is None
    assert spread(10_000, [["x"]], {"x": demand("x", None, 8)}) == ("x",) * 10_000
