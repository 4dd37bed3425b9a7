"""How many communicators a device is in, and what that costs."""

from __future__ import annotations

from rlflow.communicators import buffer_mib, communicators
from rlflow.ir.flow import Layout


def test_one_device_still_has_its_pool() -> None:
    assert communicators([Layout()]) == 1


def test_plain_data_parallelism_is_the_pool_itself() -> None:
    assert communicators([Layout(dp=8)]) == 1


def test_every_axis_counts_once() -> None:
    # tp, cp, dp, gradients over dp x cp, pp, and all ranks
    assert communicators([Layout(tp=2, cp=2, dp=2, pp=2)]) == 6
    # experts over four neighbours: dp 8 cut in two
    assert communicators([Layout(dp=8, ep=4)]) == 2


def test_layouts_share_the_groups_of_equal_ranks() -> None:
    train, rollout = Layout(tp=2, dp=4), Layout(tp=2, dp=4)
    assert communicators([train, rollout]) == communicators([train]) == 3
    assert communicators([train, Layout(tp=4, dp=2)]) == 5


def test_exchanges_with_other_pools_are_further_ones() -> None:
    assert communicators([Layout(dp=8)], between_pools=2) == 3


def test_buffers_shrink_into_the_room() -> None:
    gib = 1 << 30
    assert buffer_mib(8, 4 * gib) == 200
    assert buffer_mib(8, 2 * gib) == 128
    assert buffer_mib(8, 0) == buffer_mib(8, -gib) == 0
