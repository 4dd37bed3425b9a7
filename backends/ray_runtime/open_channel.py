"""From a reshard of the plan to this rank's end of it: the transfer set is worked out again from the same facts.

The plan holds the numbers of a reshard, not its transfers, which grow with layers x devices. What is worked out here is
checked against those numbers, so that a rank cannot move other bytes than the plan says.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from rlflow.backends.ray_runtime.deliveries import Reading
from rlflow.backends.ray_runtime.local_weights import catalogue_of
from rlflow.backends.ray_runtime.reshard_links import ReshardLinks
from rlflow.backends.ray_runtime.weight_channel import WeightChannel
from rlflow.backends.ray_runtime.world import World
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.flow import Layout
from rlflow.ir.ops import FrozenModel, Lora, ValueModel
from rlflow.plan import Plan
from rlflow.plan_decisions import Reshard
from rlflow.reshard.adapters import adapter_layout, adapters_of
from rlflow.reshard.catalogue import Catalogue
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.plan import ReshardPlan, plan_reshard
from rlflow.reshard.storage import Storage


def open_channel(
    plan: Plan,
    reshard: Reshard,
    world: World,
    config: PretrainedConfig,
    device: torch.device,
    frozen: str = "",
) -> WeightChannel:
    """All ranks of both pools call, in the order of the plan. RLF4003 for weights that cannot be moved yet.

    Of a model with adapters these alone are moved. `frozen` is what tells the weights beside them on this rank from
    others: RLF5018 where a rank loaded others than the first one.
    """
    if isinstance(plan.model(reshard.model).source, ValueModel):
        raise RunFailure("RLF4003", f"the value model `{reshard.model}` is read on another pool or layout than trained")
    planned = runtime_plan(plan, reshard, config)
    if planned.received_bytes != reshard.received and reshard.needed:
        raise RunFailure(
            "RLF5018",
            f"the reshard of `{reshard.model}` would move {planned.received_bytes} bytes, and the plan says "
            f"{reshard.received}",
            help=("compile the plan again with this version of rlflow",),
        )
    here = world.ranks(reshard.source)
    there = () if reshard.source == reshard.target else world.ranks(reshard.target)
    members = (*here, *there)
    group = world.between(members, f"weights {reshard.id}") if len(members) > 1 else None
    if reshard.adapters and group is not None:
        _check_frozen(reshard, world, members, frozen, group)
    links = ReshardLinks(
        planned,
        reshard.bucket_bytes or 2 << 30,
        members.index(world.number),
        {device: device for device in range(len(members))},
        group,
        getattr(torch, planned.target.storage.dtype),
        device,
    )
    return WeightChannel(reshard, links, Reading.of(plan, reshard), reshard.model, world.timeout.total_seconds())


def runtime_plan(plan: Plan, reshard: Reshard, config: PretrainedConfig) -> ReshardPlan:
    """The transfer set. Devices are the ranks of the source pool and, where it is another, of the target pool."""
    before, after = (layout_of(plan, stage) for stage in (reshard.trainer, reshard.readers[0]))
    source, target = (next(p for p in plan.pools if p.name == name) for name in (reshard.source, reshard.target))
    shared = source.name == target.name
    size = len(source.ranks)
    devices = reshard.mapping or tuple(range(0 if shared else size, (0 if shared else size) + after.size))
    hosts = [place.host for place in (*source.ranks, *(() if shared else target.ranks))]
    names = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    fabric = Fabric(tuple(names[host] for host in hosts), (1.0,) * len(hosts), {n: 1.0 for n in names.values()})
    dtype = "bfloat16" if compute_of(plan, reshard.model) == "bf16" else "float32"
    tensors = tensors_of(config)
    if reshard.adapters:  # they are trained in 32 bits, and added up before rounding
        dtype, before, after = "float32", adapter_layout(before), adapter_layout(after)
        tensors = adapters_of(tensors, lora_of(plan, reshard.model))
    given, read = (
        Endpoint(layout, ranks, Storage(vocabulary_multiple=layout.tp, dtype=dtype, mtp=False))
        for layout, ranks in ((before, tuple(range(size))), (after, devices))
    )
    return plan_reshard(tensors, given, read, fabric)


def lora_of(plan: Plan, model: str) -> Lora:
    """Of a model that has adapters."""
    found: Lora | None = getattr(plan.model(model).source, "lora", None)
    assert found is not None
    return found


def _check_frozen(
    reshard: Reshard, world: World, members: tuple[int, ...], mine: str, group: dist.ProcessGroup
) -> None:
    """Adapters that are added to other weights than they were trained beside give a model that nobody trained."""
    found = [""] * len(members)
    dist.all_gather_object(found, mine, group=group)
    other = next((place for place, each in enumerate(found) if each != found[0]), None)
    if other is None:
        return
    names = [world.name_of(members[place]) for place in (0, other)]
    raise RunFailure(
        "RLF5018",
        f"{names[1]} loaded other weights of `{reshard.model}` than {names[0]}, and only its adapters are sent",
        notes=tuple(f"{name}: sum {each[:16]}..." for name, each in zip(names, (found[0], found[other]), strict=True)),
        help=("put the same checkpoint on every host, or name it by a path that all hosts share",),
    )


def tensors_of(config: PretrainedConfig) -> Catalogue:
    """The tensors of a loaded model under the names of reshards. RLF4003 for an architecture without rules."""
    try:
        return catalogue_of(config)
    except ReshardError as error:
        raise RunFailure(
            "RLF4003",
            f"weights of type `{config.model_type}` cannot be moved between layouts yet",
            notes=error.problems,
        ) from None


def layout_of(plan: Plan, stage: str) -> Layout:
    """Of a stage with a model."""
    layout = plan.stage(stage).layout
    assert layout is not None
    return Layout(**layout.model_dump())


def compute_of(plan: Plan, model: str) -> Literal["fp32", "bf16"]:
    """The precision of a model's matrix products: that of the model it was made from."""
    source = plan.model(model).source
    while isinstance(source, FrozenModel | ValueModel):
        source = plan.model(source.of).source
    return source.compute
