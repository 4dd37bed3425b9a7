"""Rounds on numbers that users met: an embedding larger than the bucket, fused tensors, stages side by side."""

from __future__ import annotations

import pytest

from rlflow.cluster.presets.architecture import architecture
from rlflow.ir.flow import Layout
from rlflow.reshard.boxes import volume
from rlflow.reshard.buckets import plan_buckets, received_in, round_transfers
from rlflow.reshard.catalogue import EMBEDDING, Catalogue, Home, Rule, TensorSpec, catalogue
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.plan import plan_reshard
from rlflow.reshard.storage import VLLM

MIB = 1 << 20
FABRIC = Fabric.uniform(16, 8, 1e9, 1e9)


def one_tensor(spec, source=None, target=None):
    tensors = Catalogue((spec,), 1)
    return plan_reshard(tensors, source or Endpoint(Layout(), (0,)), target or Endpoint(Layout(), (1,)), FABRIC)


LARGE = TensorSpec(EMBEDDING, (248_320, 5120), Rule.VOCAB, 0, 248_320, Home.EMBEDDING)
LARGE_BYTES = 248_320 * 5120 * 2


def test_an_embedding_larger_than_the_bucket_grows_it():
    assert LARGE_BYTES == 2425 * MIB
    grown = plan_buckets(one_tensor(LARGE), 2048 * MIB, double_buffered=False, oversized="grow")
    assert grown.grown
    assert grown.capacity_bytes == 2425 * MIB
    assert len(grown.rounds) == 1
    double = plan_buckets(one_tensor(LARGE), 2048 * MIB, oversized="grow")
    assert double.buffer_bytes == 2425 * MIB
    assert double.capacity_bytes == 4850 * MIB


def test_or_is_split_at_rows():
    plan = one_tensor(LARGE)
    split = plan_buckets(plan, 2048 * MIB, double_buffered=False)
    assert len(split.rounds) == split.least_rounds == 2
    assert not split.grown
    rows = [t.box[0] for units in split.rounds for t in round_transfers(plan, units)]
    assert sum(high - low for low, high in rows) == 248_320
    assert all((high - low) * 5120 * 2 <= 2048 * MIB for low, high in rows)
    assert split.largest_bytes == max((high - low) * 10_240 for low, high in rows)


def test_or_is_an_error_with_both_numbers():
    with pytest.raises(ReshardError, match=r"model\.embed_tokens\.weight: 2542796800 bytes .* holds 2147483648"):
        plan_buckets(one_tensor(LARGE), 2048 * MIB, double_buffered=False, oversized="error")


def test_a_bucket_of_just_the_size_suffices_and_one_element_less_does_not():
    plan = one_tensor(LARGE)
    exact = plan_buckets(plan, LARGE_BYTES, double_buffered=False, oversized="error")
    assert [len(units) for units in exact.rounds] == [1]
    with pytest.raises(ReshardError, match="a buffer holds 2542796798"):
        plan_buckets(plan, LARGE_BYTES - 2, double_buffered=False, oversized="error")
    less = plan_buckets(plan, LARGE_BYTES - 2, double_buffered=False)
    assert len(less.rounds) == 2
    assert less.largest_bytes <= LARGE_BYTES - 2


def test_a_bucket_below_a_row_is_an_error():
    with pytest.raises(ReshardError, match="one row of a transfer has 10240 bytes, a buffer holds 10000"):
        plan_buckets(one_tensor(LARGE), 10_000, double_buffered=False)
    with pytest.raises(ReshardError, match="holds no element"):
        plan_buckets(one_tensor(LARGE), 2)


def test_fused_experts_are_measured_together():
    """Gate and up of the target's fused tensor count as one, though each fits alone."""
    name = "model.layers.0.mlp.experts.{}_proj.weight"
    specs = tuple(
        TensorSpec(name.format(n), (8, 64, 32), Rule.EXPERT, 1, 64, layer=0, fused="gate_up") for n in ("gate", "up")
    )
    plan = plan_reshard(Catalogue(specs, 1), Endpoint(Layout(), (0,)), Endpoint(Layout(), (1,), VLLM), FABRIC)
    half = 8 * 64 * 32 * 2
    with pytest.raises(ReshardError, match=r"gate_up_proj\.weight: 65536 bytes"):
        plan_buckets(plan, half, double_buffered=False, oversized="error")
    both = plan_buckets(plan, 2 * half, double_buffered=False)
    assert [[unit.tensors for unit in units] for units in both.rounds] == [[(specs[0].name, specs[1].name)]]
    apart = plan_reshard(Catalogue(specs, 1), Endpoint(Layout(), (0,)), Endpoint(Layout(), (1,)), FABRIC)
    assert len(plan_buckets(apart, half, double_buffered=False, oversized="error").rounds) == 2


def test_many_boxes_of_one_row_spread_over_the_pieces():
    """A unit of 64 flat shards: its pieces must not all end in the same round."""
    spec = TensorSpec("model.norm.weight", (64,), home=Home.HEAD)
    plan = one_tensor(spec, Endpoint(Layout(dp=8, zero=3), tuple(range(8))), Endpoint(Layout(), (8,)))
    buckets = plan_buckets(plan, 16, double_buffered=False)
    assert buckets.largest_bytes <= 16
    assert buckets.least_rounds == 8
    assert sum(volume(t.box) for units in buckets.rounds for t in round_transfers(plan, units)) == 64


def test_no_unit_is_in_two_rounds_and_rounds_are_near_the_bound():
    tensors = catalogue(architecture("qwen3_8b"))
    source = Endpoint(Layout(tp=2, pp=4), tuple(range(8)))
    target = Endpoint(Layout(tp=4, pp=2), tuple(range(8, 16)), VLLM)
    plan = plan_reshard(tensors, source, target, FABRIC)
    buckets = plan_buckets(plan, 1024 * MIB)
    names = [name for units in buckets.rounds for unit in units for name in unit.tensors]
    assert sorted(names) == sorted(s.name for s in tensors)
    most = max(plan.link_bytes()["device in"].values())
    assert buckets.least_rounds == -(-most // (1024 * MIB))
    assert len(buckets.rounds) <= 2 * -(-most // (512 * MIB))
    # all stages of both sides take part in all rounds but the last: no link waits for its turn
    for units in buckets.rounds[:-1]:
        received = received_in(plan, units)
        assert len(received) == 8
        assert (
            len({t.source // 2 for t in plan.transfers(names=[n for u in units for n in u.tensors]) if t.step == 0})
            == 4
        )


def test_transfers_of_one_device_are_those_of_the_whole():
    tensors = catalogue(architecture("qwen3_8b"))
    plan = plan_reshard(tensors, Endpoint(Layout(tp=2), (0, 1)), Endpoint(Layout(tp=4), (2, 3, 4, 5)), FABRIC)
    buckets = plan_buckets(plan, 2048 * MIB)
    for units in buckets.rounds[:2]:
        everything = list(round_transfers(plan, units))
        assert list(round_transfers(plan, units, {3})) == [t for t in everything if 3 in (t.source, t.target)]
