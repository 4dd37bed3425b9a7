"""insert-reshards: how weights get from the layout that trains to every layout that reads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from rlflow.ir.decisions import Reshard
from rlflow.ir.flow import EdgeKind, Flow, Layout, Node, PoolSpec, Stage
from rlflow.ir.ops import Train
from rlflow.passes.base import Pass, PassContext
from rlflow.values import dataclass

if TYPE_CHECKING:
    from rlflow.passes.analysis.costs import Costs
    from rlflow.reshard.endpoint import Fabric
    from rlflow.reshard.plan import ReshardPlan

BUCKET_BYTES = 2 * 2**30
"""Beside both layouts on a device, at most: two buffers of 1 GiB, one filled while the other is emptied."""


@dataclass(frozen=True, slots=True)
class InsertReshards(Pass):
    """Plan the transfer of weights wherever the devices that read hold other parts than those that train; of a model
    of which only adapters are trained, the transfer of these.

    Every missing byte is received once, which is the least possible; where the pools share devices, ranks are mapped so
    that the most is already in place. Readers of one model in one layout on one pool share a reshard. A model whose
    architecture is not known is resharded all the same; only the numbers are missing.
    """

    name: ClassVar[str] = "insert-reshards"
    requires: ClassVar[Stage] = Stage.PHYSICAL
    ensures: ClassVar[Stage] = Stage.PHYSICAL

    def run(self, flow: Flow, context: PassContext) -> Flow:
        wanted = _wanted(flow)
        _check_pins(wanted, context)
        if not wanted:
            return flow
        from rlflow.passes.analysis.costs import Costs

        costs = Costs(flow, context)
        planned = [_plan(flow, trainer, readers, costs, context) for trainer, readers in wanted]
        found: list[Reshard] = []
        for reshard in planned:
            if reshard is not None:
                same = sum(1 for other in found if (other.model, other.target) == (reshard.model, reshard.target))
                found.append(replace(reshard, id=f"{reshard.model} {same + 1}" if same else reshard.model))
        return replace(flow, decisions=(*flow.decisions, *found))


def _wanted(flow: Flow) -> list[tuple[Node, list[Node]]]:
    """Trainers, each with the stages of one other pool or layout that read its weights."""
    groups: dict[tuple[str, str, Layout], list[Node]] = {}
    for edge in flow.edges:
        if edge.kind is not EdgeKind.WEIGHTS:
            continue
        trainer, reader = flow.nodes[edge.src], flow.nodes[edge.dst]
        here, there = trainer.placement, reader.placement
        assert here is not None
        assert there is not None
        if here.layout is None or there.layout is None:
            continue
        if here.pool != there.pool or here.layout.weights != there.layout.weights:
            groups.setdefault((trainer.id, there.pool, there.layout.weights), []).append(reader)
    return [(flow.nodes[trainer], readers) for (trainer, _, _), readers in groups.items()]


def _check_pins(wanted: list[tuple[Node, list[Node]]], context: PassContext) -> None:
    """`reshard` of a `place` concerns weights that are trained on the same devices in another layout."""
    moved = {
        reader.id
        for trainer, readers in wanted
        for reader in readers
        if trainer.placement is not None and reader.placement is not None
        if trainer.placement.pool == reader.placement.pool
    }
    for place in context.schedule.places:
        if place.reshard is not None and not moved.intersection(place.nodes):
            context.error(
                "RLF2006",
                f"`reshard = {place.reshard}` concerns weights that are trained on the same pool in another layout, "
                "and no stage placed here reads such",
                place.settings.get("reshard", place.span),
                help=("leave it out",),
            )


def _plan(flow: Flow, trainer: Node, readers: list[Node], costs: Costs, context: PassContext) -> Reshard | None:
    from rlflow.passes.analysis.adapted import lora_of
    from rlflow.passes.analysis.in_place import storages
    from rlflow.reshard.adapters import adapter_layout, adapters_of
    from rlflow.reshard.atoms import atom_classes
    from rlflow.reshard.buckets import plan_buckets, split_tensors
    from rlflow.reshard.catalogue import catalogue
    from rlflow.reshard.endpoint import Endpoint
    from rlflow.reshard.errors import ReshardError
    from rlflow.reshard.exchange import expert_exchange
    from rlflow.reshard.mapping import map_ranks
    from rlflow.reshard.plan import plan_reshard
    from rlflow.reshard.shards import Sharding

    assert isinstance(trainer.op, Train)
    architecture = context.architectures.get(trainer.op.model)
    if architecture is None or not _fits(flow, readers[0], costs, context):
        return None
    here, there = trainer.placement, readers[0].placement
    assert here is not None and here.layout is not None  # noqa: PT018
    assert there is not None and there.layout is not None  # noqa: PT018
    source, target = flow.pools[here.pool], flow.pools[there.pool]
    shared = source.name == target.name
    size = len(source.host_of_rank)
    first = 0 if shared else size
    lora, old, new = lora_of(flow, trainer.op.model), here.layout, there.layout
    before, after = storages((old, new), costs.precision(trainer.op.model))
    if lora is not None:  # adapters are trained in 32 bits, and added up before rounding
        old, new = adapter_layout(old), adapter_layout(new)
        before, after = (replace(storage, dtype="float32") for storage in (before, after))
    vocabulary = int(architecture.facts["vocab_size"])
    padded = (before.padded_vocabulary(vocabulary), after.padded_vocabulary(vocabulary))
    fabric, nodes = _fabric(source, target, costs)
    try:
        tensors = catalogue(architecture, mtp=False)
        tensors = tensors if lora is None else adapters_of(tensors, lora)
        devices = tuple(range(first, first + new.size))
        if shared and lora is None:
            ranks = atom_classes(Sharding(tensors, old, before), Sharding(tensors, new, after))
            freely = map_ranks(ranks, tuple(range(size)), devices, fabric=fabric).devices
            if _on_one_node(freely, new.tp, fabric):
                devices = freely
            elif _on_one_node(devices, new.tp, fabric):
                together = new.tp
                devices = map_ranks(ranks, tuple(range(size)), devices, together=together, fabric=fabric).devices
        plan = plan_reshard(
            tensors,
            Endpoint(old, tuple(range(size)), before),
            Endpoint(new, devices, after),
            fabric,
        )
        buckets = plan_buckets(plan, BUCKET_BYTES) if plan.received_bytes else None
    except ReshardError as error:
        context.error("RLF2001", f"`{trainer.op.model}` cannot be resharded: {error}", readers[0].span)
        return None
    exchange = expert_exchange(plan) if shared and lora is None and context.shapes[trainer.op.model].experts else None
    busiest = max(plan.loads.device_in.values(), default=0) * plan.element_bytes
    sent = max(plan.loads.device_out.values(), default=0) * plan.element_bytes
    bucket = 0 if buckets is None else min(buckets.capacity_bytes, BUCKET_BYTES)
    bound_us, us = _times(plan.bounds.seconds, busiest, source, target, costs)
    us += 0 if lora is None else _merging(trainer.op.model, there.layout, target, costs)
    return Reshard(
        id=trainer.op.model,
        model=trainer.op.model,
        trainer=trainer.id,
        readers=tuple(reader.id for reader in readers),
        source=source.name,
        target=target.name,
        needed=plan.kept_bytes + plan.received_bytes,
        local=plan.kept_bytes,
        received=plan.received_bytes,
        lower_bound=plan.bounds.received_bytes,
        busiest=busiest,
        sent=sent,
        node_in=max(plan.loads.node_in.values(), default=0) * plan.element_bytes,
        node_out=max(plan.loads.node_out.values(), default=0) * plan.element_bytes,
        bucket_bytes=bucket,
        split=() if buckets is None else split_tensors(buckets),
        padded_vocabulary=() if lora is not None or padded == (vocabulary, vocabulary) else padded,
        rounds=0 if buckets is None else len(buckets.rounds),
        mapping=() if devices == tuple(range(first, first + len(devices))) else devices,
        traffic=_traffic(plan, nodes),
        all_to_all=exchange is not None and exchange.whole_experts,
        adapters=lora is not None,
        bound_us=bound_us,
        us=us,
        span=readers[0].span,
    )


def _merging(model: str, layout: Layout, pool: PoolSpec, costs: Costs) -> int:
    """Microseconds to read the frozen weights of the adapted layers and to write them with the adapters added in; 0
    where the memory of the devices is not known."""
    from rlflow.cost.roofline import memory_seconds
    from rlflow.passes.analysis.adapted import merged_bytes

    machine = costs.machine(pool)
    if machine is None:
        return 0
    moved, copying = 2 * merged_bytes(model, layout, costs), machine.calibration.constants.memory_copy
    return round(memory_seconds(moved, machine.memory_bytes_per_s, copying) * 1e6)


def _fits(flow: Flow, reader: Node, costs: Costs, context: PassContext) -> bool:
    """Whether a device of the reader can hold its weights at all. If not, insert-swaps refuses the plan, and rounds for
    what could never be received would take minutes to find. Errors of the layout are insert-swaps' too."""
    from rlflow.cost.errors import CostError
    from rlflow.passes.analysis.fit import usable_bytes

    assert reader.placement is not None
    pool = flow.pools[reader.placement.pool]
    machine = costs.machine(pool)
    if machine is None:
        return True
    room = usable_bytes(pool, machine, context)
    try:
        cost = costs.cost(reader, memory_bytes=room)
    except CostError:
        return True
    return cost is None or cost.static.weights <= room


def _on_one_node(devices: tuple[int, ...], tp: int, fabric: Fabric) -> bool:
    """Whether the devices of every tensor-parallel group, which talk in every layer, are on one node."""
    nodes = [fabric.node_of[device] for device in devices]
    return all(len(set(nodes[start : start + tp])) == 1 for start in range(0, len(nodes), tp))


MAX_NODES = 64
"""Above, the bytes from every node to every other would be most of the plan."""


def _traffic(plan: ReshardPlan, nodes: tuple[str, ...]) -> tuple[tuple[str, str, int], ...]:
    if len(nodes) > MAX_NODES:
        return ()
    return tuple((nodes[start], nodes[end], size) for (start, end), size in plan.node_bytes().items())


def _fabric(source: PoolSpec, target: PoolSpec, costs: Costs) -> tuple[Fabric, tuple[str, ...]]:
    """Devices numbered pool after pool, and the names of the nodes. A node is what the scale-up network joins: a host
    or a supernode.

    Where the links of a device are not known all are taken as equal, so that traffic is balanced all the same.
    """
    from rlflow.reshard.endpoint import Fabric

    pools = [source] if source.name == target.name else [source, target]
    supernodes = {host.name: host.supernode or host.name for host in costs.context.cluster.hosts}
    names: dict[str, int] = {}
    nodes: list[int] = []
    ports: list[float] = []
    ways_out: dict[int, float] = {}
    for pool in pools:
        machine = costs.machine(pool)
        inside = 1.0 if machine is None or machine.inside is None else machine.inside.bytes_per_s
        across = inside if machine is None or machine.across is None else machine.across.bytes_per_s
        for host in pool.host_of_rank:
            node = names.setdefault(supernodes.get(host, host), len(names))
            nodes.append(node)
            ports.append(inside)
            ways_out[node] = ways_out.get(node, 0.0) + across
    return Fabric(tuple(nodes), tuple(ports), ways_out), tuple(names)


def _times(bound: float, busiest: int, source: PoolSpec, target: PoolSpec, costs: Costs) -> tuple[int, int]:
    """Microseconds that the links allow at best, and with the share of them that synchronisations reach; 0 where the
    links are not known."""
    from rlflow.cost.errors import UnknownFactError
    from rlflow.cost.sync import weight_sync

    machine = costs.machine(target)
    if machine is None or costs.machine(source) is None or not busiest:
        return 0, 0
    hosts = {*source.host_of_rank, *target.host_of_rank}
    joined = {host.supernode or host.name for host in costs.context.cluster.hosts if host.name in hosts}
    try:
        link = machine.link_inside() if len(joined) == 1 else machine.link_across()
    except UnknownFactError:
        return 0, 0
    return round(bound * 1e6), round(weight_sync(busiest, link, machine) * 1e6)
