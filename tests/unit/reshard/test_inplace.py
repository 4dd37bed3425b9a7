"""In-place orders: circles are broken, the peak rule, and an order that is wrong is found to be wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlflow.ir.flow import Layout
from rlflow.reshard.catalogue import Catalogue, Rule, TensorSpec
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.execute import cut
from rlflow.reshard.inplace import Act, order_in_place
from rlflow.reshard.plan import plan_reshard
from rlflow.reshard.play import execute_in_place, play
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import Storage

FABRIC = Fabric.uniform(8, 8, 1e9, 1e9)
WIDE = Storage(dtype="float32")


def matrices(layers, rows=16, columns=8, dim=0):
    size = (rows, columns)[dim]
    return Catalogue(
        tuple(
            TensorSpec(f"model.layers.{i}.up.weight", (rows, columns), Rule.SHARD, dim, size, layer=i)
            for i in range(layers)
        ),
        layers,
    )


def planned(tensors, before, after, devices):
    ends = Endpoint(before, tuple(range(before.size)), WIDE), Endpoint(after, devices, WIDE)
    return plan_reshard(tensors, *ends, FABRIC, min_split_bytes=1)


def check(plan, order):
    """Real bytes come out right."""
    tensors = plan.catalogue
    values = {s.name: i * 1000 + np.arange(s.elements, dtype=np.int32).reshape(s.shape) for i, s in enumerate(tensors)}
    sides = [Sharding(tensors, end.layout, end.storage) for end in (plan.source, plan.target)]
    before, after = (
        {d: cut(side, values, r) for r, d in enumerate(end.devices)}
        for side, end in zip(sides, (plan.source, plan.target), strict=True)
    )
    found = execute_in_place(plan, order, before)
    for device, shards in after.items():
        for name, value in shards.items():
            np.testing.assert_array_equal(found[device][name], value)


def test_two_devices_that_swap_their_shards_need_one_piece_of_staging():
    plan = planned(matrices(4), Layout(tp=2), Layout(tp=2), (1, 0))
    order = order_in_place(plan, 64)  # a shard has 4 x 256 bytes
    assert order.fits
    assert sum(order.staging_bytes.values()) == 32
    assert play(plan, order) == {d: 1024 + order.staging_bytes.get(d, 0) for d in (0, 1)}
    assert (
        sum(step.act is Act.STAGE for step in order.steps) == sum(step.act is Act.UNSTAGE for step in order.steps) > 0
    )
    check(plan, order)


@pytest.mark.parametrize(
    ("before", "after", "devices"),
    [
        (Layout(tp=4), Layout(tp=2, dp=2), (0, 1, 2, 3)),  # grows
        (Layout(tp=2, dp=2), Layout(tp=4), (0, 1, 2, 3)),  # shrinks
        (Layout(pp=4), Layout(tp=4), (0, 1, 2, 3)),  # all to all
        (Layout(tp=2, pp=2), Layout(tp=2, dp=2), (3, 1, 0, 2)),
        (Layout(pp=2, tp=2), Layout(pp=2, tp=2), (2, 3, 0, 1)),  # stages swap
        (Layout(dp=4, zero=3), Layout(tp=2, dp=2), (0, 1, 2, 3)),
        (Layout(tp=2), Layout(tp=4), (1, 2, 3, 4)),  # partly the same devices
        (Layout(tp=2), Layout(tp=2), (2, 3)),  # others
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_the_peak_is_the_larger_layout_and_at_most_a_bucket(before, after, devices, dim):
    plan = planned(matrices(4, 16, 16, dim), before, after, devices)
    order = order_in_place(plan, 512)
    peak = play(plan, order)
    sides = {}
    for end in (plan.source, plan.target):
        sharding = Sharding(plan.catalogue, end.layout, WIDE)
        for rank, device in enumerate(end.devices):
            sides[device] = max(sides.get(device, 0), sharding.bytes_of(rank))
    assert order.fits
    assert all(peak[device] <= sides[device] + 512 for device in peak)
    assert peak.keys() == sides.keys()
    check(plan, order)


def test_what_stays_where_it_is_is_no_step():
    plan = planned(matrices(3), Layout(tp=2), Layout(tp=2), (0, 1))
    assert order_in_place(plan, 64).steps == ()


def test_a_wrong_order_is_found_out():
    plan = planned(matrices(4), Layout(tp=4), Layout(tp=2, dp=2), (0, 1, 2, 3))
    order = order_in_place(plan, 256)
    play(plan, order)
    with pytest.raises(ReshardError, match="overwritten before it is read"):
        play(plan, replace(order, steps=order.steps[::-1]))
    swap = planned(matrices(4), Layout(tp=2), Layout(tp=2), (1, 0))
    good = order_in_place(swap, 64)
    without = tuple(step for step in good.steps if step.act is not Act.STAGE)
    with pytest.raises(ReshardError, match="is not staged"):
        play(swap, replace(good, steps=without))
    with pytest.raises(ReshardError, match="stays in the staging buffer"):
        play(swap, replace(good, steps=tuple(step for step in good.steps if step.act is Act.STAGE)))


def test_a_piece_that_moves_onto_itself_is_staged():
    """Columns of a matrix close up: the first rows overlap where they go."""
    plan = planned(matrices(1, 16, 16, 1), Layout(), Layout(tp=2), (0, 1))
    order = order_in_place(plan, 4096)
    staged = {step.transfer for step in order.steps if step.act is Act.STAGE}
    assert staged
    play(plan, order)
    direct = [replace(s, act=Act.MOVE) if s.act is Act.UNSTAGE else s for s in order.steps if s.act is not Act.STAGE]
    with pytest.raises(ReshardError, match=r"overlaps itself|is overwritten"):
        play(plan, replace(order, steps=tuple(direct)))


def test_a_row_larger_than_the_bucket_is_an_error():
    plan = planned(matrices(1), Layout(tp=2), Layout(tp=2), (1, 0))
    with pytest.raises(ReshardError, match="a row has 32 bytes, the bucket 16"):
        order_in_place(plan, 16)


def test_element_types_of_other_sizes():
    """float32 to bfloat16 on the same devices: addresses are in bytes, and the larger side is the peak."""
    tensors = matrices(4)
    source, target = Endpoint(Layout(tp=2), (0, 1), WIDE), Endpoint(Layout(tp=2), (1, 0), Storage(dtype="bfloat16"))
    plan = plan_reshard(tensors, source, target, FABRIC)
    order = order_in_place(plan, 128)
    assert play(plan, order) == {d: 1024 + order.staging_bytes.get(d, 0) for d in (0, 1)}
    assert order.fits
