"""Time and memory of planned reshards between four processes, against all-gather-then-slice and against bare gloo.

    python benchmarks/reshard_transfer.py

Weights of a Qwen3 in bf16 go from one layout to another over gloo in three ways, in turns: as rlflow executes its plan
(`ReshardLinks`: local copies, rounds of packed messages, checksums); by gathering every tensor on every rank and
slicing it; and, as what the links give, the plan's bytes between the same pairs in one message each, from buffers made
before. Every result of the first two is compared bit by bit with a slice of the whole. See README.md.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from transformers import Qwen3Config

from rlflow.backends.ray_runtime.reshard_links import Moved, ReshardLinks
from rlflow.cluster.presets.architecture import Architecture
from rlflow.cluster.presets.from_config import facts_of_config
from rlflow.ir.flow import Layout
from rlflow.reshard.boxes import slices, volume
from rlflow.reshard.catalogue import Catalogue, catalogue
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.plan import ReshardPlan, plan_reshard
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import Storage

WORLD = 4
ALL = (0, 1, 2, 3)
CASES: dict[str, tuple[Layout, tuple[int, ...], Layout, tuple[int, ...]]] = {
    "tp4 to tp2": (Layout(tp=4), ALL, Layout(tp=2), (0, 1)),
    "tp4 to tp2 x dp2": (Layout(tp=4), ALL, Layout(tp=2, dp=2), ALL),
    "tp2 to tp4": (Layout(tp=2), (0, 1), Layout(tp=4), ALL),
    "pp2 to tp2, apart": (Layout(pp=2), (0, 1), Layout(tp=2), (2, 3)),
}
"""Layout and processes before and after."""
AIM_GATHER, AIM_RAW = 2.0, 1.5
"""Of tp4 to tp2: at least so many times faster than gathering, at most so many times the bare transfer."""
Tensors = dict[str, torch.Tensor]


def tensors_of(layers: int, hidden: int) -> Catalogue:
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    facts = facts_of_config(config.to_dict())
    assert facts is not None
    return catalogue(Architecture("benchmark", facts), mtp=False)


def plan_of(case: str, tensors: Catalogue) -> ReshardPlan:
    before, here, after, there = CASES[case]
    storage = Storage(vocabulary_multiple=4, mtp=False)
    ends = Endpoint(before, here, storage), Endpoint(after, there, storage)
    return plan_reshard(tensors, *ends, Fabric.uniform(WORLD, WORLD, 1e9, 1e9))


def whole(tensors: Catalogue, name: str) -> torch.Tensor:
    """A tensor of the whole model, the same in every process."""
    spec = tensors[name]
    generator = torch.Generator().manual_seed([s.name for s in tensors].index(name))
    return torch.randint(-30_000, 30_000, spec.shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)


def shards(end: Endpoint, tensors: Catalogue, device: int, filled: bool) -> Tensors | None:
    """What a device holds."""
    if device not in end.devices:
        return None
    sharding, rank = Sharding(tensors, end.layout, end.storage), end.devices.index(device)
    found = {}
    for name, local in sharding.local_tensors(rank).items():
        found[name] = torch.zeros(sharding.local_shape(rank, local), dtype=torch.bfloat16)
        for piece in sharding.pieces(rank, name) if filled else ():
            found[name][slices(piece.local)] = whole(tensors, name)[slices(piece.box)]
    return found


# --- the three ways ---------------------------------------------------------------------------------------------------


def gather_then_slice(plan: ReshardPlan, source: Tensors | None, target: Tensors | None) -> None:
    """Every tensor whole on every rank in turn, from the first ranks that hold its parts."""
    before = Sharding(plan.catalogue, plan.source.layout, plan.source.storage)
    after = Sharding(plan.catalogue, plan.target.layout, plan.target.storage)
    for spec in plan.catalogue:
        stage = before.stages(spec)[0] * before.stage_size
        parts = [(boxes[0], plan.source.devices[stage + ranks[0]]) for boxes, ranks in before.groups(spec.name)]
        found = [torch.empty([high - low for low, high in box], dtype=torch.bfloat16) for box, _ in parts]
        if len(parts) == WORLD:
            assert source is not None
            dist.all_gather(found, source[spec.name])
        else:
            for part, (_, holder) in zip(found, parts, strict=True):
                if dist.get_rank() == holder:
                    assert source is not None
                    part.copy_(source[spec.name])
                dist.broadcast(part, src=holder)
        full = torch.cat(found, spec.dim) if len(found) > 1 else found[0]
        if target is not None:
            for piece in after.pieces(plan.target.devices.index(dist.get_rank()), spec.name):
                target[spec.name][slices(piece.local)] = full[slices(piece.box)]


class Raw:
    """The plan's bytes between the same pairs, one message for each, from and to buffers that are there already."""

    def __init__(self, plan: ReshardPlan) -> None:
        sizes: dict[tuple[int, int], int] = {}
        for transfer in plan.transfers():
            pair = transfer.source, transfer.target
            sizes[pair] = sizes.get(pair, 0) + volume(transfer.box) * plan.element_bytes
        self.buffers = {pair: torch.ones(n, dtype=torch.uint8) for pair, n in sizes.items() if dist.get_rank() in pair}

    def run(self) -> None:
        works = []
        for (source, target), buffer in self.buffers.items():
            here = dist.get_rank() == source
            works.append(dist.isend(buffer, dst=target) if here else dist.irecv(buffer, src=source))
        for work in works:
            assert work is not None
            work.wait()


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    seconds: dict[str, list[float]]
    processor: dict[str, float]
    """Seconds of all ranks together, of all repetitions."""
    peaks: dict[str, int]
    """Bytes allocated beside both layouts, on the rank with the most."""
    received: int
    bound: int
    weights: int


def timed(work: Callable[[], Any]) -> float:
    """Seconds until all ranks are done."""
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


def peak_of(work: Callable[[], Any]) -> int:
    """The most bytes that torch allocates while `work` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(held), default=0)


def together(number: int, how: Any) -> int:
    value = torch.tensor([number])
    dist.all_reduce(value, how)
    return int(value)


def measure(case: str, arguments: argparse.Namespace) -> Measured:
    tensors = tensors_of(arguments.layers, arguments.hidden)
    plan, me = plan_of(case, tensors), dist.get_rank()
    bucket = arguments.bucket << 20
    links = ReshardLinks(plan, bucket, me, dict(enumerate(ALL)), None, torch.bfloat16, torch.device("cpu"))
    source, wanted = shards(plan.source, tensors, me, True), shards(plan.target, tensors, me, True)
    target = shards(plan.target, tensors, me, False)
    raw = Raw(plan)
    moved = Moved()

    def planned() -> None:
        nonlocal moved
        moved = links.run(source, target, 1)

    ways: Mapping[str, Callable[[], None]] = {
        "planned": planned,
        "gather": lambda: gather_then_slice(plan, source, target),
        "raw": raw.run,
    }
    peaks = {}
    for name in ("planned", "gather"):
        for tensor in (target or {}).values():
            tensor.zero_()
        peaks[name] = together(peak_of(ways[name]), dist.ReduceOp.MAX)
        for key, tensor in (wanted or {}).items():
            assert target is not None
            assert torch.equal(tensor.view(torch.int16), target[key].view(torch.int16)), f"{name}: {key}"
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    used = dict.fromkeys(ways, 0.0)
    names = list(ways)
    for number in range(arguments.rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            before = time.process_time()
            seconds[name].append(timed(ways[name]))
            used[name] += time.process_time() - before
    processor = {name: together(round(1e6 * value), dist.ReduceOp.SUM) / 1e6 for name, value in used.items()}
    received = together(moved.received, dist.ReduceOp.SUM)
    assert received == plan.received_bytes == plan.bounds.received_bytes
    return Measured(seconds, processor, peaks, received, plan.bounds.received_bytes, tensors.elements * 2)


def report(case: str, found: Measured, cap: int) -> None:
    middle = {name: statistics.median(values) for name, values in found.seconds.items()}

    def ratio(slow: str, fast: str) -> str:
        pairs = [a / b for a, b in zip(found.seconds[slow], found.seconds[fast], strict=True)]
        return f"{slow} / {fast} {middle[slow] / middle[fast]:.2f} (median of pairs {statistics.median(pairs):.2f})"

    print(f"{case}: {found.weights / 1e6:.0f} MB of weights, received {found.received / 1e6:.1f} MB = the lower bound")
    print("  " + ", ".join(f"{name} {1e3 * value:.0f} ms" for name, value in middle.items()))
    print(f"  {ratio('gather', 'planned')}, {ratio('planned', 'raw')}")
    used = found.processor
    print(
        f"  processor time: gather / planned {used['gather'] / used['planned']:.2f}, planned / raw "
        f"{used['planned'] / used['raw']:.2f}"
    )
    print(
        f"  peak extra memory: planned {found.peaks['planned'] / 2**20:.1f} MiB (cap {cap} MiB), gather "
        f"{found.peaks['gather'] / 2**20:.1f} MiB",
        flush=True,
    )
    assert found.peaks["planned"] <= cap << 20, "more memory than the cap"


def process(rank: int, store: Path, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store.as_uri(), rank=rank, world_size=WORLD, timeout=timedelta(seconds=300)
    )
    for case in arguments.case or CASES:
        found = measure(case, arguments)
        if rank == 0:
            report(case, found, arguments.bucket)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Planned reshards against all-gather-then-slice and bare gloo.")
    for name, default, words in (
        ("--rounds", 9, "repetitions of every way"),
        ("--layers", 8, "the model's layers"),
        ("--hidden", 1024, "the model's width"),
        ("--bucket", 64, "the cap on extra memory, MiB"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{words} (default %(default)s)")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one (default: all)")
    arguments = parser.parse_args()
    print(
        f"aims for tp4 to tp2: gather / planned at least {AIM_GATHER:g}, planned / raw at most {AIM_RAW:g}", flush=True
    )
    with tempfile.TemporaryDirectory(prefix="reshard-") as folder:
        multiprocessing.spawn(process, (Path(folder) / "store", arguments), nprocs=WORLD)


if __name__ == "__main__":
    main()
