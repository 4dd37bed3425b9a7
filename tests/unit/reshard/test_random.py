"""Random models, random pairs of layouts: shards, plans, rounds and in-place orders against plain slicing."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reshard_models import architectures, naive_shard, numbered, reshards, sides

from rlflow.reshard.boxes import volume
from rlflow.reshard.buckets import plan_buckets, received_in, round_transfers
from rlflow.reshard.catalogue import catalogue
from rlflow.reshard.execute import cut, digests, execute, gather
from rlflow.reshard.inplace import order_in_place
from rlflow.reshard.need import volumes
from rlflow.reshard.plan import plan_reshard
from rlflow.reshard.play import execute_in_place, play
from rlflow.reshard.shards import Sharding

quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def shards_of(case, endpoint):
    return {
        d: naive_shard(case[0], case[1], endpoint.layout, endpoint.storage, r) for r, d in enumerate(endpoint.devices)
    }


def same(found, expected):
    assert found.keys() == expected.keys()
    for device, shards in expected.items():
        assert found[device].keys() == shards.keys()
        for name, value in shards.items():
            np.testing.assert_array_equal(found[device][name], value, err_msg=f"{device} {name}")


@quick
@given(st.data())
def test_every_rank_holds_what_plain_slicing_gives(data):
    architecture = data.draw(architectures())
    tensors = catalogue(architecture)
    layout, storage = data.draw(sides(tensors))
    sharding = Sharding(tensors, layout, storage)
    arrays = numbered(tensors)
    for rank in range(layout.size):
        expected = naive_shard(architecture, tensors, layout, storage, rank)
        found = cut(sharding, arrays, rank)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        assert sharding.bytes_of(rank) == 4 * sum(v.size for v in expected.values())
    ranks = {rank: naive_shard(architecture, tensors, layout, storage, rank) for rank in range(layout.size)}
    for spec in tensors:
        np.testing.assert_array_equal(gather(sharding, ranks, spec.name), arrays[spec.name])


@quick
@given(reshards(), st.booleans(), st.sampled_from([1, 64, 1 << 20]))
def test_a_plan_gives_every_rank_its_shards_with_the_fewest_bytes(case, multicast, min_split):
    _, tensors, source, target, fabric = case
    plan = plan_reshard(tensors, source, target, fabric, multicast=multicast, min_split_bytes=min_split)
    before, after = shards_of(case, source), shards_of(case, target)
    result = execute(plan, before)
    same(result, after)

    # the bound, by sets of element numbers
    def ids(shards):
        return {
            device: set(np.concatenate([a.ravel() for a in s.values()] or [[0]]).tolist()) - {0}
            for device, s in shards.items()
        }

    have, need = ids(before), ids(after)
    missing = {d: len(need[d] - have.get(d, set())) for d in need}
    assert plan.bounds.received_bytes == plan.received_bytes == 4 * sum(missing.values())
    assert plan.redundancy == 0
    assert plan.kept_bytes == 4 * sum(len(need[d] & have.get(d, set())) for d in need)
    assert {d: n for d, n in volumes(plan.classes).missing.items() if n} == {d: n for d, n in missing.items() if n}

    # the loads, transfer by transfer
    out, into, leaves, enters, between = {}, {}, {}, {}, {}
    for t in plan.transfers():
        size = volume(t.box) * 4
        out[t.source] = out.get(t.source, 0) + size
        into[t.target] = into.get(t.target, 0) + size
        a, b = fabric.node_of[t.source], fabric.node_of[t.target]
        between[a, b] = between.get((a, b), 0) + size
        if a != b:
            leaves[a] = leaves.get(a, 0) + size
            enters[b] = enters.get(b, 0) + size
    assert plan.link_bytes() == {"device out": out, "device in": into, "node out": leaves, "node in": enters}
    assert plan.node_bytes() == between
    times = [n / 1e9 for n in (*out.values(), *into.values())] + [n / 3e8 for n in (*leaves.values(), *enters.values())]
    assert abs(plan.seconds - max(times, default=0)) < 1e-12
    assert plan.seconds >= plan.bounds.seconds * (1 - 1e-9)

    # a node gets no more than its devices need and none of them has, with multicast
    if multicast:
        nodes = set(fabric.node_of)

        def of(sets, node):
            return set().union(*(s for d, s in sets.items() if fabric.node_of[d] == node))

        assert enters == {n: 4 * len(of(need, n) - of(have, n)) for n in nodes if of(need, n) - of(have, n)}


@quick
@given(reshards(), st.integers(16, 400), st.booleans())
def test_rounds_stay_under_the_cap_and_are_the_whole_plan(case, cap, double):
    _, tensors, source, target, fabric = case
    plan = plan_reshard(tensors, source, target, fabric, min_split_bytes=32)
    cap = cap * 8
    buckets = plan_buckets(plan, cap, double_buffered=double)
    assert not buckets.grown
    seen = []
    largest = 0
    for units in buckets.rounds:
        received = received_in(plan, units)
        largest = max(largest, *received.values())
        assert largest * buckets.buffers <= cap
        seen += list(round_transfers(plan, units))
    assert largest == buckets.largest_bytes
    assert len(buckets.rounds) >= buckets.least_rounds
    same(execute(plan, shards_of(case, source), transfers=[*plan.copies(), *seen]), shards_of(case, target))


@quick
@given(reshards(), st.sampled_from([64, 256, 4096]))
def test_in_place_the_peak_is_the_larger_layout_and_the_staging(case, bucket):
    _, tensors, source, target, fabric = case
    plan = plan_reshard(tensors, source, target, fabric, min_split_bytes=1)
    order = order_in_place(plan, bucket)
    before, after = shards_of(case, source), shards_of(case, target)
    peak = play(plan, order)
    for device, most in peak.items():
        sizes = [sum(a.nbytes for a in side.get(device, {}).values()) for side in (before, after)]
        assert most == max(sizes) + order.staging_bytes.get(device, 0)
    found = execute_in_place(plan, order, before)
    for device, shards in after.items():
        for name, value in shards.items():
            real = value != 0  # padding is undefined in place
            np.testing.assert_array_equal(found[device][name][real], value[real], err_msg=f"{device} {name}")


@settings(quick, max_examples=10)
@given(reshards())
def test_digests_survive(case):
    _, tensors, source, target, fabric = case
    plan = plan_reshard(tensors, source, target, fabric)
    held = shards_of(case, source)
    before = digests(
        Sharding(tensors, source.layout, source.storage),
        {r: held[d] for r, d in enumerate(source.devices)},
    )
    result = execute(plan, held)
    after = digests(
        Sharding(tensors, target.layout, target.storage), {r: result[d] for r, d in enumerate(target.devices)}
    )
    assert after == {name: before[name] for name in after}
    assert len(set(before.values())) == len(before)
