"""Orders of whole tensors: real bytes come out right, staging is what it says, and one order serves many devices."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlflow.cluster import presets
from rlflow.cluster.presets.architecture import Architecture
from rlflow.ir.flow import Layout
from rlflow.reshard.catalogue import Catalogue, Rule, TensorSpec, catalogue
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.execute import cut
from rlflow.reshard.inplace import Act
from rlflow.reshard.plan import plan_reshard
from rlflow.reshard.play import execute_in_place
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import Storage
from rlflow.reshard.tensor_order import as_steps, order_tensors

WIDE = Storage(dtype="float32")


def mixed(layers):
    """Two matrices cut along different dimensions and a norm that every rank has, in every layer."""
    specs = []
    for i in range(layers):
        before = f"model.layers.{i}"
        specs += [
            TensorSpec(f"{before}.up.weight", (16, 8), Rule.SHARD, 0, 16, layer=i),
            TensorSpec(f"{before}.norm.weight", (8,), Rule.REPLICATE, 0, 8, layer=i),
            TensorSpec(f"{before}.down.weight", (8, 16), Rule.SHARD, 1, 16, layer=i),
        ]
    return Catalogue(tuple(specs), layers)


LAYOUTS = [
    layout
    for dp in (1, 2, 4)
    for tp in (1, 2, 4)
    for pp in (1, 2, 4)
    if dp * tp * pp == 4
    for layout in (Layout(dp=dp, tp=tp, pp=pp), Layout(dp=dp, tp=tp, pp=pp, zero=3))
]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.permutations(range(4)))
def test_real_bytes_come_out_right_and_staging_is_what_it_says(before, after, devices):
    tensors = mixed(4)
    ends = Endpoint(before, (0, 1, 2, 3), WIDE), Endpoint(after, tuple(devices), WIDE)
    order = order_tensors(tensors, *ends)
    plan = plan_reshard(tensors, *ends, Fabric.uniform(4, 4, 1e9, 1e9), min_split_bytes=1)
    values = {s.name: i * 1000 + np.arange(s.elements, dtype=np.int32).reshape(s.shape) for i, s in enumerate(tensors)}
    old, new = (Sharding(tensors, end.layout, end.storage) for end in ends)
    held = {d: cut(old, values, r) for r, d in enumerate(ends[0].devices)}
    found = execute_in_place(plan, as_steps(plan, order, 512), held)
    for rank, device in enumerate(ends[1].devices):
        for name, value in cut(new, values, rank).items():
            np.testing.assert_array_equal(found[device][name], value)
    assert most_staged(order, old) == order.staging_bytes


def most_staged(order, sharding):
    """The order gone through: no tensor is staged twice, all that is staged is written."""
    most, names = 0, set()
    for act, tensor in order.steps:
        if act is Act.STAGE:
            assert tensor not in names
            names.add(tensor)
        elif act is Act.UNSTAGE:
            names.remove(tensor)
        for rank in range(sharding.layout.size):
            mine = [name for name in names if sharding.holds(rank, name)]
            size = sum(prod(sharding.local_shape(rank, sharding.local(name)[0])) for name in mine)
            most = max(most, size * sharding.storage.element_bytes)
    assert not names
    return most


def test_a_layout_that_grows_is_filled_from_its_end_and_stages_only_the_first_tensor():
    order = order_tensors(mixed(4), *ends(Layout(tp=4), Layout(dp=2, tp=2)))
    written = [tensor for act, tensor in order.steps if act is not Act.STAGE]
    assert written.index("model.layers.3.down.weight") < written.index("model.layers.1.up.weight")
    assert written[-1] == "model.layers.0.up.weight"
    assert [tensor for act, tensor in order.steps if act is Act.STAGE] == ["model.layers.0.up.weight"]
    assert order.staging_bytes == 16 * 8 * 4 // 4


def ends(before, after):
    return Endpoint(before, tuple(range(before.size)), WIDE), Endpoint(after, tuple(range(after.size)), WIDE)


def test_what_stays_where_it_is_is_no_step():
    assert order_tensors(mixed(3), *ends(Layout(tp=2), Layout(tp=2))).steps == ()


@pytest.mark.parametrize(("model", "scale"), [("qwen3_8b", 1), ("qwen3_8b", 8)])
def test_the_order_does_not_grow_with_the_devices(model, scale):
    tensors = catalogue(Architecture(model, presets.model(model)), mtp=False)
    before, after = Layout(dp=2 * scale, tp=4), Layout(dp=4 * scale, tp=2)
    order = order_tensors(tensors, *ends(before, after))
    assert len(order.steps) <= len(list(tensors)) + 2
    assert order.staging_bytes < 2**30
