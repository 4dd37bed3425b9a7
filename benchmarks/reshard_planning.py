"""How long a reshard takes to plan: Pangu Ultra MoE 718B from 512 training devices to 1,024 others for rollout.

python benchmarks/reshard_planning.py [--rounds 5]

The aim is below 2 s. Beside it, on a reduced size, a naive planner: every tensor, every target rank, every source
rank, no classes, one message per intersection. Both must find the same bytes. The ratio is of processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

from rlflow.cluster.presets.architecture import Architecture, architecture
from rlflow.ir.flow import Layout
from rlflow.reshard.boxes import intersect, subtract, volume
from rlflow.reshard.buckets import plan_buckets
from rlflow.reshard.catalogue import Catalogue, catalogue
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.plan import ReshardPlan, plan_reshard
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import MEGATRON, VLLM

AIM_SECONDS = 2.0
PER_NODE = 16
DEVICE_BANDWIDTH = 196e9  # byte/s of one die within the supernode
NODE_BANDWIDTH = 16 * 25e9  # byte/s of a node's RoCE ports together
Value = TypeVar("Value")


def fabric(devices: int) -> Fabric:
    return Fabric.uniform(devices, PER_NODE, DEVICE_BANDWIDTH, NODE_BANDWIDTH)


def ends(train: Layout, rollout: Layout) -> tuple[Endpoint, Endpoint]:
    """On devices of their own, one pool after the other."""
    first, total = train.size, train.size + rollout.size
    return Endpoint(train, tuple(range(first)), MEGATRON), Endpoint(rollout, tuple(range(first, total)), VLLM)


def naive(tensors: Catalogue, source: Endpoint, target: Endpoint) -> tuple[list[tuple[str, object, int, int]], int]:
    """Transfers and their elements: each missing box from the first rank that has it."""
    before, after = (Sharding(tensors, end.layout, end.storage) for end in (source, target))
    transfers: list[tuple[str, object, int, int]] = []
    elements = 0
    for spec in tensors:
        for rank, device in enumerate(target.devices):
            left = [piece.box for piece in after.pieces(rank, spec.name)]
            for other, sender in enumerate(source.devices):
                for piece in before.pieces(other, spec.name) if left else ():
                    for box in left:
                        common = intersect(piece.box, box)
                        if common is not None:
                            transfers.append((spec.name, common, sender, device))
                            elements += volume(common)
                    left = [rest for box in left for rest in subtract(box, piece.box)]
            assert not left, f"nobody has all of {spec.name}"
    return transfers, elements


def timed(work: Callable[[], Value], rounds: int) -> tuple[float, float, Value]:
    """Median seconds on the clock and of this process, and the last result."""
    clock, process = [], []
    for _ in range(rounds):
        started, used = time.perf_counter(), time.process_time()
        result = work()
        clock.append(time.perf_counter() - started)
        process.append(time.process_time() - used)
    return statistics.median(clock), statistics.median(process), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds

    model = architecture("pangu_ultra_moe_718b")
    train = Layout(tp=8, pp=8, dp=8, ep=32, split=(7, 7, 8, 8, 8, 8, 8, 7))
    rollout = Layout(tp=4, dp=256, ep=256)
    source, target = ends(train, rollout)

    def whole() -> ReshardPlan:
        return plan_reshard(catalogue(model), source, target, fabric(train.size + rollout.size))

    clock, process, plan = timed(whole, rounds)
    print(f"{model.name}: {train.size} -> {rollout.size} devices, catalogue to plan")
    print(f"  {clock:.2f} s on the clock, {process:.2f} s of this process (aim: below {AIM_SECONDS:.0f} s)")
    print(f"  {len(plan.classes)} classes, sources by {plan.source_choice}, redundancy {plan.redundancy:g}")
    largest = plan.bounds.largest_receiver_bytes / 1e9
    print(f"  received {plan.received_bytes / 1e12:.2f} TB in all, {largest:.1f} GB by a device at most")
    print(f"  busiest link {plan.seconds:.3f} s, bound {plan.bounds.seconds:.3f} s ({plan.bounds.tightest})")
    clock, process, buckets = timed(lambda: plan_buckets(plan, 2 << 30), rounds)
    print(f"  buckets of 2 GiB: {len(buckets.rounds)} rounds in {clock:.2f} s ({process:.2f} s of this process)")

    facts = dict(model.facts) | {"num_layers": 4, "num_dense_layers": 1, "num_mtp_layers": 0}
    tensors = catalogue(Architecture("reduced", facts))
    small_source, small_target = ends(Layout(tp=8, pp=2, dp=4, ep=32), Layout(tp=4, dp=32, ep=128))
    small_fabric = fabric(len(small_source.devices) + len(small_target.devices))
    _, ours, small = timed(lambda: plan_reshard(tensors, small_source, small_target, small_fabric), rounds)
    _, theirs, (transfers, elements) = timed(lambda: naive(tensors, small_source, small_target), 1)
    assert elements * small.element_bytes == small.received_bytes
    print(f"reduced to 4 layers: {len(small_source.devices)} -> {len(small_target.devices)} devices")
    print(f"  {ours:.3f} s; naive {theirs:.2f} s ({len(transfers)} messages); ratio {theirs / ours:.0f}")


if __name__ == "__main__":
    main()
