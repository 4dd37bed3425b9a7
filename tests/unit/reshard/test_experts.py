"""Experts change hands: identity, and the buffer of an all-to-all against that of an all-gather."""

from __future__ import annotations

import numpy as np
import pytest

from rlflow.cluster.presets.architecture import architecture
from rlflow.ir.flow import Layout
from rlflow.reshard.catalogue import Catalogue, Rule, TensorSpec, catalogue
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.exchange import expert_exchange
from rlflow.reshard.execute import cut, digest, execute, gather
from rlflow.reshard.plan import plan_reshard
from rlflow.reshard.shards import Sharding


def test_experts_keep_their_identity():
    """128 experts, each filled with its number; ep 4, pp 2, tp 2 to everything on one device, and to ep 16."""
    specs = tuple(
        TensorSpec(f"model.layers.{i}.mlp.experts.up_proj.weight", (128, 4, 2), Rule.EXPERT, 1, 4, layer=i)
        for i in range(2)
    )
    tensors = Catalogue(specs, 2)
    values = {s.name: np.broadcast_to(np.arange(128)[:, None, None], s.shape).copy() for s in specs}
    before = Layout(dp=2, tp=2, pp=2, ep=4)
    source = Sharding(tensors, before)
    shards = {rank: cut(source, values, rank) for rank in range(8)}
    fabric = Fabric.uniform(24, 8, 1e9, 1e9)
    for layout, devices in (
        (Layout(), (8,)),
        (Layout(dp=16, ep=16), tuple(range(8, 24))),
        (Layout(dp=8, ep=8), tuple(range(8))),
    ):
        plan = plan_reshard(tensors, Endpoint(before, tuple(range(8))), Endpoint(layout, devices), fabric)
        result = execute(plan, shards)
        by_rank = {rank: result[device] for rank, device in enumerate(devices)}
        for spec in specs:
            found = gather(Sharding(tensors, layout), by_rank, spec.name)
            assert [set(found[e].ravel().tolist()) for e in range(128)] == [{e} for e in range(128)]
            assert len({digest(found[e]) for e in range(128)}) == 128


def test_the_buffer_of_deepseek_v3():
    """One expert's gate and up is 0.0547 GiB; an all-gather over 256 ranks needs 14 GiB for what 0.0547 suffice."""
    tensors = catalogue(architecture("deepseek_v3_671b"), mtp=False)
    train = Endpoint(Layout(tp=4, pp=8, dp=8, ep=8, split=(7, 7, 8, 8, 8, 8, 8, 7)), tuple(range(256)))
    rollout = Endpoint(Layout(tp=4, dp=64, ep=256), tuple(range(256)))
    exchange = expert_exchange(plan_reshard(tensors, train, rollout, Fabric.uniform(256, 16, 196e9, 400e9)))
    assert exchange.whole_experts
    one = 2 * 7168 * 2048 * 2
    assert one == 58_720_256
    assert round(one / 2**30, 4) == 0.0547
    assert exchange.buffer_bytes == one
    assert exchange.all_gather_bytes == 256 * one == 14 * 2**30
    assert exchange.saved == pytest.approx(1 - 1 / 256)
    assert round(100 * exchange.saved, 1) == 99.6


def test_what_is_sent_is_what_is_missing():
    tensors = catalogue(architecture("qwen3_30b_a3b"))
    fabric = Fabric.uniform(8, 8, 1e9, 1e9)
    devices = tuple(range(8))
    plan = plan_reshard(tensors, Endpoint(Layout(dp=8, ep=4), devices), Endpoint(Layout(dp=8, ep=8), devices), fabric)
    exchange = expert_exchange(plan)
    # ranks 0..3 hold experts 32 r .., twice; rank q of ep 8 needs 16 q ..: device 0 has its part, device 1 needs 16..31 of 0
    one = architecture("qwen3_30b_a3b").params_routed_experts // 128 * 2
    have = {d: set(range(32 * (d % 4), 32 * (d % 4) + 32)) for d in devices}
    need = {d: set(range(16 * d, 16 * d + 16)) for d in devices}
    missing = {d: len(need[d] - have[d]) * one for d in devices}
    into = {d: sum(n for (_, b), n in exchange.sent.items() if b == d) for d in devices}
    assert into == missing
    assert sum(missing.values()) == plan.received_bytes
    assert all(16 * b // 32 == a % 4 for a, b in exchange.sent)
    assert expert_exchange(plan_reshard(tensors, plan.source, plan.source, fabric)) is None


def test_a_change_of_expert_tensor_parallelism_cuts_experts():
    tensors = catalogue(architecture("qwen3_30b_a3b"))
    fabric = Fabric.uniform(4, 4, 1e9, 1e9)
    a, b = Endpoint(Layout(tp=2, ep=2), (0, 1)), Endpoint(Layout(tp=2, etp=2), (2, 3))
    assert not expert_exchange(plan_reshard(tensors, a, b, fabric)).whole_experts
    dense = catalogue(architecture("qwen3_8b"))
    assert expert_exchange(plan_reshard(dense, Endpoint(Layout(), (0,)), Endpoint(Layout(), (1,)), fabric)) is None
