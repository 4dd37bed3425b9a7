"""Volumes and lower bounds on hand-worked cases and published formulas."""

from __future__ import annotations

from fractions import Fraction

import pytest

from rlflow.cluster.presets.architecture import architecture
from rlflow.ir.flow import Layout
from rlflow.reshard.atoms import AtomClass, Part, atom_classes
from rlflow.reshard.bounds import lower_bounds
from rlflow.reshard.catalogue import Catalogue, Home, Rule, TensorSpec, catalogue
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.mapping import map_ranks
from rlflow.reshard.plan import plan_reshard
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import Storage


def matrices(layers=8, size=16):
    """Only what tensor parallelism divides, all of it within layers: the model of the published formulas."""
    return Catalogue(
        tuple(
            TensorSpec(f"model.layers.{i}.{name}.weight", (size, size), Rule.SHARD, dim, size, Home.LAYER, i)
            for i in range(layers)
            for name, dim in (("up", 0), ("down", 1))
        ),
        layers,
    )


HYBRID = [
    # train (t, p, d) -> generate (t_g, p_g) on the same devices
    ((8, 1, 2), (2, 1)),
    ((4, 2, 2), (2, 1)),
    ((4, 4, 1), (4, 1)),
    ((8, 1, 1), (1, 1)),
    ((2, 4, 2), (2, 2)),
    ((4, 2, 1), (4, 2)),
]


@pytest.mark.parametrize(("train", "generate"), HYBRID)
def test_volumes_of_hybridflow(train, generate):
    """HybridFlow (Sheng et al. 2024): every device receives (tp - t_g p_g) / (t_g p_g t p) of the model."""
    (t, p, d), (tg, pg) = train, generate
    tensors, n = matrices(), t * p * d
    before, after = Layout(tp=t, pp=p, dp=d), Layout(tp=tg, pp=pg, dp=n // (tg * pg))
    devices = tuple(range(n))
    mapping = map_ranks(atom_classes(Sharding(tensors, before), Sharding(tensors, after)), devices, devices)
    fabric = Fabric.uniform(n, n, 1e9, 1e9)
    plan = plan_reshard(tensors, Endpoint(before, devices), Endpoint(after, mapping.devices), fabric)
    model = tensors.elements * 2
    each = Fraction(t * p - tg * pg, tg * pg * t * p) * model
    assert plan.link_bytes()["device in"] == ({device: each for device in devices} if each else {})
    assert plan.redundancy == 0
    # DeepSpeed-Chat gathers over all devices, HybridFlow without its grouping over the t x p of a replica
    assert each <= Fraction(t * p - 1, t * p) * model <= Fraction(t * p * d - 1, t * p * d) * model


def test_grouping_of_the_ranks_is_what_makes_the_volume_small():
    """Without a mapping tp 8 -> tp 2 keeps what happens to overlap; no mapping keeps more than all that a device has."""
    tensors = matrices()
    before, after, devices = Layout(tp=8), Layout(tp=2, dp=4), tuple(range(8))
    classes = atom_classes(Sharding(tensors, before), Sharding(tensors, after))
    fabric = Fabric.uniform(8, 8, 1e9, 1e9)
    plain = plan_reshard(tensors, Endpoint(before, devices), Endpoint(after, devices), fabric)
    mapping = map_ranks(classes, devices, devices)
    mapped = plan_reshard(tensors, Endpoint(before, devices), Endpoint(after, mapping.devices), fabric)
    assert mapped.kept_bytes == tensors.elements * 2 > plain.kept_bytes


def atoms(holders, needers, elements):
    return AtomClass(holders, needers, (Part(("w",), (((0, elements),),)),))


def test_each_of_the_three_bounds():
    fabric = Fabric((0, 0, 1, 1, 2, 2), (10.0,) * 6, {0: 4.0, 1: 2.0, 2: 4.0})
    # device 0 alone has 100 elements; both devices of node 1 and one of node 2 need them
    one = lower_bounds([atoms((0,), (2, 3, 4), 100)], fabric, 1)
    assert (one.received_bytes, one.largest_receiver_bytes) == (300, 100)
    assert (one.receive_seconds, one.node_seconds, one.source_seconds) == (10.0, 50.0, 25.0)
    assert (one.seconds, one.tightest) == (50.0, "node")
    # a neighbour within the node: nothing enters a node
    near = lower_bounds([atoms((0,), (0, 1), 100)], fabric, 1)
    assert (near.receive_seconds, near.node_seconds, near.source_seconds) == (10.0, 0.0, 10.0)
    # two classes held within nodes 0 and 1 leave over both of their uplinks, and one of them only over node 1's
    both = lower_bounds([atoms((0, 2), (4,), 60), atoms((2,), (5,), 50)], fabric, 2)
    assert both.source_seconds == max(2 * 110 / 6, 2 * 50 / 2)
    assert both.node_seconds == 2 * 110 / 4
    # what is needed by another holder's group only does not leave that group
    inside = lower_bounds([atoms((0,), (2,), 70), atoms((0, 2), (2, 4), 30)], fabric, 1)
    assert inside.source_seconds == max(70 / 4, 30 / 6, (70 + 30) / 1e9)


def test_nothing_to_do_costs_nothing():
    tensors = matrices(2, 4)
    end = Endpoint(Layout(tp=2), (0, 1))
    plan = plan_reshard(tensors, end, end, Fabric.uniform(2, 2, 1e9, 1e9))
    assert plan.received_bytes == plan.bounds.received_bytes == 0
    assert (plan.seconds, plan.redundancy, plan.distance) == (0.0, 0.0, 0.0)
    assert list(plan.transfers()) == []
    assert plan.kept_bytes == tensors.elements * 2


def test_a_change_of_element_type_is_explicit_and_the_wire_carries_the_narrower():
    tensors, fabric = matrices(2, 4), Fabric.uniform(2, 2, 1e9, 1e9)
    wide, narrow = (
        Endpoint(Layout(), (0,), Storage(dtype="float32")),
        Endpoint(Layout(), (1,), Storage(dtype="bfloat16")),
    )
    down, up = plan_reshard(tensors, wide, narrow, fabric), plan_reshard(tensors, narrow, wide, fabric)
    assert (down.cast.source, down.cast.target, down.cast.at) == ("float32", "bfloat16", "sender")
    assert (up.cast.at, plan_reshard(tensors, wide, wide, fabric).cast) == ("receiver", None)
    assert down.received_bytes == up.received_bytes == tensors.elements * 2


def test_the_plan_does_not_grow_with_the_layers():
    def classes(layers):
        tensors = matrices(layers)
        return atom_classes(Sharding(tensors, Layout(tp=4, pp=2)), Sharding(tensors, Layout(tp=8)))

    few, many = classes(4), classes(64)
    assert len(few) == len(many)
    assert [len(found.parts) for found in few] == [len(found.parts) for found in many]


def test_a_large_model_between_two_pools():
    """DeepSeek-V3 from 256 devices to 128 others: nothing is received twice, the busiest link is at the bound."""
    tensors = catalogue(architecture("deepseek_v3_671b"), mtp=False)
    train = Endpoint(Layout(tp=4, pp=8, dp=8, ep=8, split=(7, 7, 8, 8, 8, 8, 8, 7)), tuple(range(256)))
    rollout = Endpoint(Layout(tp=4, dp=32, ep=128), tuple(range(256, 384)))
    plan = plan_reshard(tensors, train, rollout, Fabric.uniform(384, 16, 196e9, 400e9))
    dense = architecture("deepseek_v3_671b").params() - architecture("deepseek_v3_671b").params_routed_experts
    assert plan.redundancy == 0
    # every expert once, and of the rest one copy per replica (32), with what tp 4 replicates four times
    assert plan.received_bytes > 2 * (architecture("deepseek_v3_671b").params_routed_experts + 32 * dense)
    assert plan.distance < 0.02
