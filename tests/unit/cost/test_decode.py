"""Decode steps: hand-worked numbers, the published stair of graph buckets, and the affine form."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.cluster.presets.architecture import architecture
from rlflow.cluster.spec import Cluster, Host
from rlflow.cost.decode import PARTS, Speculation, decode_step
from rlflow.cost.dimensions import dimensions
from rlflow.cost.errors import WorkloadError
from rlflow.cost.machine import machine
from rlflow.ir.flow import Layout

quick = settings(max_examples=60, derandomize=True, deadline=None)
H100 = machine(Cluster("c", tuple(Host(f"h{i}", "h100", 8) for i in range(4))))
SUPERNODE = machine(Cluster("c", tuple(Host(f"h{i}", "ascend_910c", 16, supernode="s") for i in range(16))))


def test_dense_step_by_hand(model):
    """Qwen3-8B on one H100: all weights but the input embedding at a share of bandwidth, keys and values at a smaller
    one, 36 layers of host work."""
    step = decode_step(model("qwen3_8b"), Layout(), H100)
    knobs = H100.calibration.knobs
    rate = 3.35e12 * knobs.decode_memory
    read = (architecture("qwen3_8b").params() - 151936 * 4096) * 2 / rate
    parts = dict(zip(PARTS, step.parts(4, 8000), strict=True))
    assert parts["weights"] == pytest.approx(read)
    assert parts["kv"] == pytest.approx(8000 * 147_456 / (rate * 0.74))
    assert parts["host"] == pytest.approx(36 * knobs.host_layer_s + knobs.host_step_s + 4 * 4e-6)
    assert parts["tensor_parallel"] == parts["expert_parallel"] == parts["pipeline"] == 0
    assert step.seconds(4, 8000) == pytest.approx(sum(parts.values()))


def test_experts_that_are_read(model):
    """Distinct experts of b tokens: E (1 - (1 - k/E)^b); one token reads k of E, many all of them."""
    qwen = model("qwen3_30b_a3b")
    step = decode_step(qwen, Layout(), H100)
    whole = architecture("qwen3_30b_a3b").params_routed_experts * 2 / (3.35e12 * H100.calibration.knobs.decode_memory)
    assert step.weights(1) - step.dense_read == pytest.approx(whole * 8 / 128)
    assert step.weights(3) - step.dense_read == pytest.approx(whole * (1 - (120 / 128) ** 3))
    assert step.weights(100) - step.dense_read == pytest.approx(whole, rel=0.01)


def test_expert_groups_span_engines(model):
    """ep 8 over 8 engines: a device has an eighth of the experts, and eight engines' tokens meet there."""
    qwen = model("qwen3_30b_a3b")
    alone, spread = decode_step(qwen, Layout(), H100), decode_step(qwen, Layout(dp=8, ep=8), H100)
    assert spread.expert_read == pytest.approx(alone.expert_read / 8)
    assert spread.weights(1) - spread.dense_read == pytest.approx(spread.expert_read * (1 - (120 / 128) ** 8))


def test_stair_of_graph_buckets(model):
    """DeepSeek-V3 on 910C, ms a token at b = 64, 32, 16, 8, 4, 2, 1: with buckets 76 67 61 57 55 54 54, with one graph 76
    74 72 72 71 71 71 (cann-recipes-train). The form must follow; the level depends on contexts that are not published."""
    layout, contexts = Layout(dp=128, tp=2, ep=128), 1000
    buckets = decode_step(model("deepseek_v3_671b"), layout, SUPERNODE, buckets=(1, 2, 4, 8, 16, 32, 64))
    single = decode_step(model("deepseek_v3_671b"), layout, SUPERNODE, buckets=(64,))
    sizes = (64, 32, 16, 8, 4, 2, 1)
    with_buckets = [1000 * buckets.seconds(b, b * contexts) for b in sizes]
    with_one = [1000 * single.seconds(b, b * contexts) for b in sizes]
    published = (76, 67, 61, 57, 55, 54, 54)
    assert with_buckets == sorted(with_buckets, reverse=True)
    assert with_buckets[0] == pytest.approx(with_one[0])
    for ours, theirs in zip(with_buckets, published, strict=True):
        assert ours == pytest.approx(theirs, rel=0.1)
    assert with_buckets[0] - with_buckets[-1] == pytest.approx(22, rel=0.3)
    assert with_one[0] - with_one[-1] < 0.4 * (with_buckets[0] - with_buckets[-1])


def test_small_all_reduces_are_fast_in_one_host_only(model):
    """Eight devices of a host against eight of two hosts, joined by a scale-up network or not."""
    eight = machine(Cluster("c", (Host("a", "h100", 8),)))
    joined = machine(Cluster("c", tuple(Host(f"h{i}", "ascend_910c", 4, supernode="s") for i in range(2))))
    dense = model("qwen3_8b")
    inside, across = (decode_step(dense, Layout(tp=8), on) for on in (eight, joined))
    assert inside.reduce_latency == pytest.approx(2 * 36 * 12e-6)
    assert across.reduce_latency == pytest.approx(2 * 36 * 70e-6)


def test_expert_exchange_by_hand(model):
    """One request of two tensor-parallel ranks: 8 rows of 7168 16-bit numbers over 256 dies, at 0.52 of 135 GB/s."""
    step = decode_step(model("deepseek_v3_671b"), Layout(dp=128, tp=2, ep=256), SUPERNODE)
    assert step.exchange_latency == pytest.approx(2 * 58 * 30e-6)
    seconds = 255 / 256 * 8 * 7168 * 2 / 2 / (196e9 * 0.69 * 0.52)
    assert step.exchange_request == pytest.approx(2 * 58 * seconds)


def test_padding():
    step = replace(decode_step(dimensions(architecture("qwen3_8b")), Layout(), H100), buckets=(1, 4, 16))
    assert [step.padded(b) for b in (0.5, 1, 1.5, 4, 5, 16, 17)] == [1, 1, 4, 4, 16, 16, 17]


LAYOUTS = st.sampled_from(
    [
        Layout(),
        Layout(tp=4),
        Layout(dp=4, tp=2, ep=8),
        Layout(tp=2, pp=2),
        Layout(dp=8, tp=4, ep=32),
        Layout(dp=4, ep=4),
    ]
)


@given(LAYOUTS, st.floats(1, 500), st.floats(0, 1e6), st.sampled_from([(), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]))
@quick
def test_affine_form_holds_where_it_is_taken(layout, b, held, buckets):
    step = decode_step(dimensions(architecture("qwen3_30b_a3b")), layout, H100, buckets=buckets)
    fixed, per_request, per_token = step.affine(b)
    assert fixed + per_request * b + per_token * held == pytest.approx(step.seconds(b, held))
    assert min(per_request, per_token) >= 0


@given(LAYOUTS, st.floats(1, 500), st.floats(1, 500), st.floats(0, 1e6))
@quick
def test_more_work_takes_longer(layout, b, more, held):
    step = decode_step(dimensions(architecture("qwen3_30b_a3b")), layout, H100)
    assert step.seconds(b + more, held) >= step.seconds(b, held)
    assert step.seconds(b, held + more) > step.seconds(b, held)


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_235b_a22b", "deepseek_v3_671b"])
def test_tensor_parallel_reads_less(model, name):
    steps = [decode_step(model(name), Layout(tp=tp), H100) for tp in (1, 2, 4, 8)]
    reads = [step.dense_read + step.expert_read for step in steps]
    assert reads == sorted(reads, reverse=True)
    assert [step.kv_token for step in steps] == sorted((step.kv_token for step in steps), reverse=True)


def test_pipelining_a_step_does_not_read_less(model):
    """Every stage reads its part for every group of requests under way: a token waits for all stages."""
    qwen = model("qwen3_8b")
    one, two = decode_step(qwen, Layout(), H100), decode_step(qwen, Layout(pp=2), H100)
    assert two.dense_read >= one.dense_read
    assert two.kv_token == pytest.approx(one.kv_token / 2)


def test_speculation_by_hand():
    """Two drafted tokens at 0.5: 1 + 0.5 + 0.25 accepted; drafting at 0.1 each and 0.05 of verification."""
    spec = Speculation(2, 0.5, 0.1, 0.05)
    assert spec.accepted == 1.75
    assert spec.speed_up == pytest.approx(1.75 / 1.25)
    assert Speculation(0, 0.5, 0.1, 0.0).speed_up == 1
    with pytest.raises(WorkloadError):
        Speculation(2, 1.0, 0.1, 0.0)


def test_buckets_ascend(model):
    with pytest.raises(WorkloadError, match="ascending"):
        decode_step(model("qwen3_8b"), Layout(), H100, buckets=(4, 2))
