"""Planned reshards of real models, executed by four processes: what arrives is what gather-and-slice would give, and no
byte more is received than the plan and the lower bound say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.ray_runtime import reshard_cases as cases
from tests.unit.ray_runtime.parallel.workers import Workers, started

DRAWN = 80


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with started(cases.WORLD) as found:
        yield found


@pytest.mark.parametrize("seed", range(DRAWN))
def test_weights_are_those_of_gather_and_slice_with_the_fewest_bytes(workers: Workers, seed: int) -> None:
    case = cases.draw(seed)
    print(case)  # what failed, where it fails
    plan = case.plan()
    done = workers.run(cases.execute, seed, ranks=cases.WORLD)
    assert [rank.wrong for rank in done] == [[]] * cases.WORLD
    for moved in zip(*(rank.moved for rank in done), strict=True):
        received = sum(rank.received for rank in moved)
        assert received == sum(rank.sent for rank in moved)
        assert received == plan.received_bytes == plan.bounds.received_bytes
        assert max(rank.peak_buffers for rank in moved) <= case.bucket_bytes


def test_what_is_drawn_is_of_every_kind() -> None:
    drawn = [cases.draw(seed) for seed in range(DRAWN)]
    plans = [case.plan() for case in drawn]
    assert sum(plan.received_bytes > 0 for plan in plans) > 0.7 * DRAWN
    assert sum(any(t.step for t in plan.transfers()) for plan in plans) > 10, "multicast"
    assert sum(not set(c.source.devices) & set(c.target.devices) for c in drawn) > 10, "pools apart"
    assert sum(c.source.layout.size == c.target.layout.size == 4 for c in drawn) > 10, "one pool"
    for axis in ("tp", "pp", "dp"):
        for one, other in (("source", "target"), ("target", "source")):
            changed = [c for c in drawn if _size(c, one, axis) > _size(c, other, axis)]
            assert len(changed) > 5, (axis, one)
    assert sum(_size(c, "source", "ep") != _size(c, "target", "ep") for c in drawn) > 5
    assert sum(c.source.layout.zero == 3 or c.target.layout.zero == 3 for c in drawn) > 10
    assert sum(c.alone_bytes < 1 << 20 and c.held == str(c.wire).removeprefix("torch.") for c in drawn) > 10, "direct"


def _size(case: cases.Case, end: str, axis: str) -> int:
    return int(getattr(getattr(case, end).layout, axis))


def test_memory_stays_below_the_cap(workers: Workers) -> None:
    """As allocated, not as the links count: whatever torch makes on the way is in it."""
    cap = 300_000
    for peak, received in workers.run(cases.memory, 256, cap, ranks=cases.WORLD):
        assert received > 3 * cap / 2, "several rounds"
        assert cap / 4 < peak <= cap


def test_a_message_of_another_version_is_refused(workers: Workers) -> None:
    _, failure, *_ = workers.run(cases.refused, (6, 7), False, ranks=cases.WORLD)
    assert failure == ("RLF5018", "weights of version 6 came from rank 0 in place of version 7")


@pytest.mark.parametrize("alone_bytes", [64, 1 << 20])
def test_a_message_that_changed_on_its_way_is_refused(workers: Workers, alone_bytes: int) -> None:
    _, failure, *_ = workers.run(cases.refused, (7, 7), True, alone_bytes, ranks=cases.WORLD)
    assert failure == ("RLF5018", "weights of version 7 from rank 0 are not those that were sent")
    assert workers.run(cases.refused, (7, 7), False, alone_bytes, ranks=cases.WORLD) == [None] * cases.WORLD
