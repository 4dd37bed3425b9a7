"""What a schedule leaves open, as a problem of the placement search: stages with their costs, devices, pins."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd

from rlflow.cluster.spec import Host, PlaceRequest
from rlflow.cost.errors import CostError
from rlflow.cost.machine import Machine, machine
from rlflow.ir.flow import STEP, EdgeKind, Flow, Layout, Node, reads_model
from rlflow.ir.ops import Generate, Train
from rlflow.passes.analysis.costs import Costs
from rlflow.passes.analysis.fit import RESERVED_SHARE
from rlflow.passes.analysis.layouts import Home, layout_of
from rlflow.passes.base import PassContext
from rlflow.passes.search.devices import pool_sizes
from rlflow.passes.search.joint import Swap, resident, swap_overflow
from rlflow.passes.search.layout_space import LayoutChoice, LayoutSpace, mesh_class, stage_table
from rlflow.passes.search.options import StageOption, StageTable
from rlflow.passes.search.problem import DeviceType, Pins, PoolPin, Problem
from rlflow.passes.search.synchronous import StepGraph

HOST_SHARE = 0.9
MOST_SIZES = 24
"""Sizes of pools that are tried on one type of device: powers of two, and multiples of a host spread over the rest."""
TIME_LIMIT_S = 20.0
REFINED = 4
"""Candidates whose steady state is worked out in full."""
TOLERANCE = 0.02
"""Refining stops this near to the lower bound."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The problem, and what is needed to turn its answer into a schedule."""

    problem: Problem
    hosts: Mapping[str, tuple[str, ...]]
    """Names of the hosts of each device type, in the order of `DeviceType.hosts`."""
    pipelined: bool
    """Whether samples may be old enough for pools to work on different steps."""


def placement_problem(flow: Flow, context: PassContext) -> Setting | str:
    """The problem, or in words why there is none: a model or a device about which something is not known."""
    costs = Costs(flow, context)
    stages = [node for node in _in_order(flow) if reads_model(node.op) is not None]
    for node in stages:
        model = reads_model(node.op)
        assert model is not None
        if costs.model(model) is None:
            return costs.unknown[model]
        if costs.work(node) is None:
            return f"how many samples `{node.id}` gets is known only while running"
    kinds: dict[str, list[str]] = {}
    for host in context.cluster.hosts:
        kinds.setdefault(host.device, []).append(host.name)
    types: list[DeviceType] = []
    for kind, names in kinds.items():
        try:
            on = machine(context.cluster, tuple(names))
        except CostError as error:
            return str(error)
        types.append(_device_type(flow, kind, names, on, stages, costs, context))
    pipelined = any(_lag(flow, context, model) > 0 for model in {reads_model(n.op) or "" for n in stages})
    edges = _edges(flow, {node.id for node in stages})
    order = tuple(node.id for node in stages)
    problem = Problem(
        stages=order,
        device_types=tuple(types),
        pins=_pins(stages, context),
        reshard=_reshard(flow, types[0].name, costs, context, kinds),
        links=_links({node.id: node for node in stages}),
        period=None if pipelined else StepGraph(order, edges),
        refine_top=REFINED,
        tolerance=TOLERANCE,
        time_limit=TIME_LIMIT_S,
    )
    return Setting(problem, {kind: tuple(names) for kind, names in kinds.items()}, pipelined)


def _in_order(flow: Flow) -> Iterator[Node]:
    for node_id in flow.topological_order(STEP):
        yield flow.nodes[node_id]


def _lag(flow: Flow, context: PassContext, model: str) -> int:
    """Steps that samples of a model may be old: what the schedule asks for, or else what the flow permits."""
    asked = next((request.steps for request in context.schedule.staleness if request.model == model), None)
    return flow.allowed_staleness.get(model, 0) if asked is None else asked


# --- devices ----------------------------------------------------------------------------------------------------------


def _device_type(
    flow: Flow, kind: str, names: list[str], on: Machine, stages: list[Node], costs: Costs, context: PassContext
) -> DeviceType:
    hosts = [host for host in context.cluster.hosts if host.name in set(names)]
    counts = tuple(host.devices for host in hosts)
    capacity = on.memory_bytes - round(on.memory_bytes * RESERVED_SHARE)
    sizes = _sizes(counts, context)
    tables = {node.id: _table(flow, node, sizes, on, capacity, costs, context) for node in stages}
    return DeviceType(kind, counts, capacity, tables, _swap(hosts, on, capacity), sizes)


def _sizes(hosts: tuple[int, ...], context: PassContext) -> tuple[int, ...]:
    """All sizes worth trying where they are few, or else powers of two and an even choice of the others."""
    every = pool_sizes(hosts)
    pinned = {request.devices for request in context.schedule.pools}
    if len(every) > MOST_SIZES:
        step = len(every) / MOST_SIZES
        chosen = {every[int(i * step)] for i in range(MOST_SIZES)} | {every[-1]}
        chosen |= {size for size in every if size & (size - 1) == 0}
        every = tuple(sorted(chosen))
    return tuple(sorted({*every, *(size for size in pinned if size <= sum(hosts))}))


def _swap(hosts: list[Host], on: Machine, capacity: int) -> Swap:
    known = [(host.memory_bytes, host.devices) for host in hosts]
    try:
        rate = min(on.device.host_link(to_host=out, all_busy=True) for out in (True, False))
    except CostError:
        return resident(capacity)
    stated = [round(size * HOST_SHARE) // devices for size, devices in known if size is not None]
    share = min(stated) if len(stated) == len(known) else None
    return swap_overflow(capacity, rate * on.calibration.constants.host_link, share)


# --- layouts ----------------------------------------------------------------------------------------------------------


def _table(
    flow: Flow, node: Node, sizes: tuple[int, ...], on: Machine, capacity: int, costs: Costs, context: PassContext
) -> StageTable:
    model = reads_model(node.op)
    assert model is not None
    dims, shape, work = costs.model(model), context.shapes.get(model), costs.work(node)
    assert dims is not None
    assert work is not None
    training, sampling = isinstance(node.op, Train), isinstance(node.op, Generate)
    rows = (work.minibatch or work.prompts * work.samples) if training else work.prompts * work.samples
    experts = [e for e in (1, 8, 16, 32, 64, 128, 256) if dims.experts and dims.experts % e == 0] or [1]
    most_tp = 16 if on.supernode_devices > on.host_devices else 8
    space = LayoutSpace(
        layers=dims.layers,
        tensor=[t for t in (1, 2, 4, 8, 16) if t <= min(most_tp, on.host_devices)],
        pipeline=[1, 2] if sampling else [p for p in (1, 2, 4, 8, 16) if p <= dims.layers],
        expert=experts,
        recompute=("none", "selective", "full") if training else ("none",),
        zero=(1, 3) if training else (0,),
        sequence_parallel=(True,) if training else (False,),
        uneven=False,
        legal_mesh=lambda mesh: rows % mesh.dp == 0 and _legal(mesh, model, training),
    )
    home_shape = shape

    def _legal(mesh: Layout, model: str, training: bool) -> bool:
        request = PlaceRequest((), "", tp=mesh.tp, pp=mesh.pp, ep=mesh.ep, cp=mesh.cp, etp=mesh.etp, vp=mesh.vp)
        _, broken = layout_of(request, Home("", mesh.size, model, home_shape, training, accelerator=True))
        return not broken

    scale = costs.factor(node, on, capacity)

    def cost(choice: LayoutChoice) -> tuple[float, int, int] | None:
        try:
            found = costs.cost(node, choice.layout, on, capacity)
        except CostError:
            return None
        if found is None:
            return None
        # What generation holds is not kept: its weights are laid out anew every step, its cache is emptied.
        return found.seconds * scale, 0 if sampling else found.static.resident, found.peak_bytes

    return stage_table(space, sizes, cost, capacity, mesh_class)


# --- pins -------------------------------------------------------------------------------------------------------------


def _pins(stages: list[Node], context: PassContext) -> Pins:
    schedule = context.schedule
    ids = {node.id for node in stages}
    homes: dict[str, list[str]] = {request.name: [] for request in schedule.pools}
    layouts: dict[str, Callable[[StageOption], bool]] = {}
    for place in schedule.places:
        for node_id in place.nodes:
            if node_id in ids:
                homes.setdefault(place.pool, []).append(node_id)
                layouts[node_id] = _agrees(place)
    together = []
    for node in stages:
        if isinstance(node.op, Train):  # what computes with the weights of this step's training sits beside it
            same = [n.id for n in stages if reads_model(n.op) == node.op.model and not isinstance(n.op, Generate)]
            if len(same) > 1:
                together.append(tuple(same))
    pools = tuple(
        PoolPin(request.name, tuple(homes[request.name]), request.devices, request.device) for request in schedule.pools
    )
    return Pins(
        pools=pools,
        only_these_pools=bool(pools),
        together=tuple(together),
        apart=_apart(stages, context),
        layouts=layouts,
    )


def _apart(stages: list[Node], context: PassContext) -> tuple[tuple[str, ...], ...]:
    """Staleness and triggers that the schedule asks for need generation and training on pools of their own."""
    models = {request.model for request in context.schedule.staleness if request.steps > 0}
    waited = {request.node for request in context.schedule.triggers}
    found = []
    for trainer in stages:
        if isinstance(trainer.op, Train):
            found += [
                (node.id, trainer.id)
                for node in stages
                if isinstance(node.op, Generate) and node.op.model == trainer.op.model
                if node.op.model in models or node.id in waited
            ]
    return tuple(found)


def _agrees(place: PlaceRequest) -> Callable[[StageOption], bool]:
    wanted = {
        name: value
        for name in ("tp", "pp", "dp", "ep", "cp", "etp", "vp", "split", "sp", "zero", "recompute")
        if (value := getattr(place, name)) is not None
    }

    def agrees(option: StageOption) -> bool:
        choice = option.layout
        assert isinstance(choice, LayoutChoice)
        return all(getattr(choice.layout, name) == value for name, value in wanted.items())

    return agrees


def _edges(flow: Flow, stages: set[str]) -> tuple[tuple[str, str], ...]:
    """Which model stages wait for which, also through stages without a model."""
    sources: dict[str, list[str]] = {}
    for edge in flow.edges:
        if edge.kind is EdgeKind.DATA:
            sources.setdefault(edge.dst, []).append(edge.src)
    found: dict[tuple[str, str], None] = {}
    for stage in (node.id for node in _in_order(flow) if node.id in stages):
        stack, seen = list(sources.get(stage, [])), set()
        while stack:
            source = stack.pop()
            if source in seen:
                continue
            seen.add(source)
            if source in stages:
                found[source, stage] = None
            else:
                stack += sources.get(source, [])
    return tuple(found)


# --- reshards ---------------------------------------------------------------------------------------------------------


def _links(nodes: Mapping[str, Node]) -> Callable[[tuple[str, ...]], list[tuple[int, int]]]:
    """On one pool weights are laid out anew from the training of a model to every stage that reads it. A model that is
    trained on another pool is published to the first stage here that reads it; others take them over from that."""
    everywhere = {reads_model(node.op) for node in nodes.values() if isinstance(node.op, Train)}

    def links(stages: tuple[str, ...]) -> list[tuple[int, int]]:
        models = [reads_model(nodes[stage].op) for stage in stages]
        trained = {models[i]: i for i, stage in enumerate(stages) if isinstance(nodes[stage].op, Train)}
        found = [(trained[m], i) for i, m in enumerate(models) if m in trained and trained[m] != i]
        published = {m: i for i, m in reversed(list(enumerate(models))) if m in everywhere and m not in trained}
        return [*found, *((i, i) for i in sorted(published.values()))]

    return links


def _reshard(
    flow: Flow, kind: str, costs: Costs, context: PassContext, kinds: Mapping[str, list[str]]
) -> Callable[[str, Hashable, str, Hashable], float]:
    """Seconds to lay out a model's weights anew: what the reader's device holds (of a model with adapters: these), over
    a link inside the pool, or between pools where they come from another."""
    on = machine(context.cluster, tuple(kinds[kind]))
    joined = {host.supernode or host.name for host in context.cluster.hosts}
    inside = on.inside or on.across
    between = inside if len(joined) == 1 else on.across or on.inside

    def seconds(source: str, source_class: Hashable, target: str, target_class: Hashable) -> float:
        published = source == target
        link = between if published else inside
        if link is None or (source_class == target_class and not published):
            return 0.0
        assert isinstance(source_class, tuple)
        assert isinstance(target_class, tuple)
        beside = not published and not isinstance(flow.nodes[target].op, Generate)
        if beside and source_class[:-1] == target_class[:-1]:
            return 0.0  # beside training weights stay sharded over its replicas (the last part) for other passes too
        model = reads_model(flow.nodes[target].op)
        architecture = None if model is None else context.architectures.get(model)
        if architecture is None or model is None:
            return 0.0
        tp, pp = int(target_class[0]), int(target_class[1])
        spread = tp * pp * max(1, int(target_class[3]) // gcd(tp, int(target_class[3])))
        held = architecture.params() * costs.precision(model).weights / spread
        adapters = costs.adapters(model)
        if adapters is not None:
            held = 4 * adapters / pp
        return held / (link.bytes_per_s * on.calibration.knobs.sync_bandwidth)

    return seconds
