"""Reshards of real small models between layouts drawn at random, and the jobs that execute them on four processes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime.parallel.weights import reshard_views
from rlflow.backends.ray_runtime.reshard_links import Moved, ReshardLinks, Tensors
from rlflow.cluster.presets.architecture import Architecture
from rlflow.cluster.presets.from_config import facts_of_config
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.flow import Layout
from rlflow.reshard.catalogue import Catalogue, catalogue
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.execute import cut
from rlflow.reshard.legal import layout_problems
from rlflow.reshard.plan import ReshardPlan, plan_reshard
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import Storage
from tests.unit.ray_runtime.parallel import models

WORLD = 4
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    kind: str
    changes: tuple[tuple[str, Any], ...]
    source: Endpoint
    target: Endpoint
    """Devices are numbers of the plan, from 0."""
    per_node: int
    rank_of: tuple[int, ...]
    """Device to process."""
    bucket_bytes: int
    min_split_bytes: int
    held: str
    """Element type of the tensors that the source ranks hold; what trains has float32 masters."""
    alone_bytes: int = 1 << 20
    """The least piece in a message of its own; here none is so large."""

    @property
    def wire(self) -> torch.dtype:
        narrower = min(self.source.storage, self.target.storage, key=lambda storage: storage.element_bytes)
        return TYPES[narrower.dtype]

    def plan(self) -> ReshardPlan:
        tensors, _ = whole(self.kind, self.changes)
        fabric = Fabric.uniform(WORLD, self.per_node, 1e9, 3e8)
        return plan_reshard(tensors, self.source, self.target, fabric, min_split_bytes=self.min_split_bytes)


@lru_cache
def whole(kind: str, changes: tuple[tuple[str, Any], ...]) -> tuple[Catalogue, Mapping[str, Any]]:
    """The tensors of a real transformers model under the names of reshards, as numpy arrays without a zero."""
    loaded = models.make(kind, **dict(changes))
    facts = facts_of_config(loaded.model.config.to_dict())
    assert facts is not None
    arrays = {
        view: part.detach().numpy()
        for name, tensor in loaded.model.named_parameters()
        for view, part in reshard_views(name, tensor)
    }
    assert all((array != 0).all() for array in arrays.values()), "an element that is not written would not be seen"
    return catalogue(Architecture("small", facts), mtp=False), arrays


@lru_cache
def layouts(kind: str, changes: tuple[tuple[str, Any], ...]) -> list[Layout]:
    """All of at most 4 ranks that can hold the model."""
    tensors, _ = whole(kind, changes)
    found = []
    for dp, tp, pp, ep, etp, zero in itertools.product((1, 2, 3, 4), (1, 2, 4), (1, 2), (1, 2, 4), (1, 2), (0, 3)):
        layout = Layout(dp=dp, tp=tp, pp=pp, ep=ep, etp=etp, zero=zero)
        if layout.size <= WORLD and not layout_problems(tensors, layout, Storage(vocabulary_multiple=tp)):
            found.append(layout)
    return found


def draw(seed: int) -> Case:
    """Any kind of model, pair of layouts and pools: shared, apart, or partly the same; the same on every rank."""
    chance = random.Random(seed)
    kind = ("llama", "qwen2", "qwen3", "qwen3_moe")[seed % 4]
    changes: tuple[tuple[str, Any], ...] = (
        ("tie_word_embeddings", chance.random() < 0.5),
        ("vocab_size", chance.choice([14, 16, 19])),
    )
    if kind in ("llama", "qwen3"):
        changes += (("attention_bias", chance.random() < 0.3),)
    before = chance.choice(layouts(kind, changes))
    apart = before.size < WORLD and chance.random() < 0.5
    after = chance.choice([x for x in layouts(kind, changes) if not apart or before.size + x.size <= WORLD])
    devices = chance.sample(range(WORLD), WORLD)
    there = devices[before.size :] if apart else chance.sample(range(WORLD), WORLD)
    given, read = chance.choice(list(itertools.product(TYPES, TYPES)))

    def storage(layout: Layout, dtype: str) -> Storage:
        found = Storage(vocabulary_multiple=layout.tp, dtype=dtype, zero3=chance.choice(["rows", "flat"]), mtp=False)
        if chance.random() < 0.2:
            found = replace(found, qkv="stacked", gate_up="stacked")
        return found

    return Case(
        kind,
        changes,
        Endpoint(before, tuple(devices[: before.size]), storage(before, given)),
        Endpoint(after, tuple(there[: after.size]), storage(after, read)),
        per_node=chance.choice([1, 2, 4]),
        rank_of=tuple(chance.sample(range(WORLD), WORLD)),
        bucket_bytes=chance.choice([2048, 6000, 40_000, 1 << 24]),
        min_split_bytes=chance.choice([1, 64, 1 << 20]),
        held=chance.choice([given, "float32"]) if given == read else given,
        alone_bytes=chance.choice([8, 64, 1024, 1 << 20]),
    )


# --- jobs, called on all ranks ---------------------------------------------------------------------------------------


@dataclass
class Done:
    """What one rank saw of two runs."""

    wrong: list[str]
    moved: list[Moved]


def links_of(case: Case, kind: type[ReshardLinks] = ReshardLinks, group: Any = None) -> ReshardLinks:
    device = case.rank_of.index(dist.get_rank())
    rank_of = dict(enumerate(case.rank_of))
    cpu = torch.device("cpu")
    return kind(case.plan(), case.bucket_bytes, device, rank_of, group, case.wire, cpu, case.alone_bytes)


def tensors_of(case: Case, end: Endpoint, version: int) -> Tensors | None:
    """What this rank holds at one end of version 1 or 2, in float32."""
    device = case.rank_of.index(dist.get_rank())
    if device not in end.devices:
        return None
    tensors, arrays = whole(case.kind, case.changes)
    shards = cut(Sharding(tensors, end.layout, end.storage), arrays, end.devices.index(device))
    return {name: torch.from_numpy(array) * (1 if version == 1 else -3) for name, array in shards.items()}


def empty_target(case: Case) -> Tensors | None:
    found = tensors_of(case, case.target, 1)
    kind = TYPES[case.target.storage.dtype]
    return found and {name: torch.zeros(tensor.shape, dtype=kind) for name, tensor in found.items()}


def execute(seed: int) -> Done:
    """Two versions one after another, by the same links into the same tensors."""
    case = draw(seed)
    links, target = links_of(case), empty_target(case)
    done = Done([], [])
    for version in (1, 2):
        source = tensors_of(case, case.source, version)
        source = source and {name: tensor.to(TYPES[case.held]) for name, tensor in source.items()}
        done.moved.append(links.run(source, target, version))
        # What goes over the wire or is copied is rounded to the narrowest type on its way.
        for name, tensor in (tensors_of(case, case.target, version) or {}).items():
            assert target is not None
            kinds = (TYPES[case.held], case.wire, TYPES[case.target.storage.dtype])
            wanted, found = tensor, target[name]
            for kind in kinds:
                wanted = wanted.to(kind)
            if not torch.equal(wanted, found):
                done.wrong.append(f"{name} of version {version}")
    return done


class _Faulty(ReshardLinks):
    """One bit of an element changes on the way."""

    def _isend(self, buffer: torch.Tensor, peer: int) -> dist.Work:
        changed = buffer.clone()
        changed[len(changed) // 2] ^= 4
        return super()._isend(changed, peer)


def refused(versions: tuple[int, int], faulty: bool, alone_bytes: int = 1 << 20) -> tuple[str, str] | None:
    """One process gives all its weights to another, in one message unless pieces are large enough to go alone: code and words of the receiver's failure."""
    if dist.get_rank() > 1:
        return None
    case = replace(draw(2), bucket_bytes=1 << 24, alone_bytes=alone_bytes)
    ends = [Endpoint(Layout(), (device,), Storage(dtype="float32", mtp=False)) for device in (0, 1)]
    case = replace(case, source=ends[0], target=ends[1], held="float32", rank_of=(0, 1, 2, 3), per_node=4)
    links = links_of(case, _Faulty if faulty else ReshardLinks)
    source, target = tensors_of(case, case.source, 1), empty_target(case)
    try:
        links.run(source, target, versions[dist.get_rank()])
    except RunFailure as failure:
        return failure.code, failure.message
    return None


def memory(hidden: int, bucket_bytes: int) -> tuple[int, int]:
    """tp4 to tp2 beside it on 4 ranks, in a model that is larger than its buckets: (the most bytes allocated beside
    both layouts as torch's profiler saw them, bytes received)."""
    layouts_of = Layout(tp=4), Layout(tp=2, dp=2)
    ends = [Endpoint(x, (0, 1, 2, 3), Storage(vocabulary_multiple=x.tp, mtp=False)) for x in layouts_of]
    changes = (("hidden_size", hidden), ("intermediate_size", 3 * hidden), ("num_key_value_heads", 4))
    case = Case("qwen3", changes, *ends, 4, (0, 1, 2, 3), bucket_bytes, 1 << 20, "bfloat16")
    links, target = links_of(case), empty_target(case)
    source = tensors_of(case, case.source, 1)
    assert source is not None
    source = {name: tensor.bfloat16() for name, tensor in source.items()}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        moved = links.run(source, target, 1)
    return peak_of(profile), moved.received


def peak_of(profile: torch.profiler.profile) -> int:
    """The most bytes that were allocated since a profile began."""
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
