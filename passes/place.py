"""place: every stage to a pool, with its sharding; Python stages to CPU workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from rlflow.cluster.presets import torch_device
from rlflow.cluster.spec import LOCAL, PlaceRequest, PoolRequest
from rlflow.diagnostics import Label
from rlflow.ir.flow import STEP, EdgeKind, Flow, Layout, Node, Placement, PoolSpec, Stage, reads_model
from rlflow.ir.ops import Generate, Score, Take, Train
from rlflow.ir.typesystem import RowsType
from rlflow.passes.analysis.layouts import layout_of
from rlflow.passes.base import Pass, PassContext

DEFAULT_POOL = "main"
FUNCTIONS_POOL = "cpu"


@dataclass(frozen=True, slots=True)
class Place(Pass):
    """Put every stage on a pool: pinned stages where the schedule says, the others with those they work for.

    Without pools in the schedule everything is colocated on one. Devices are given to pools host by host, in order.
    Rewards run on CPU workers.
    """

    name: ClassVar[str] = "place"
    requires: ClassVar[Stage] = Stage.LOGICAL
    ensures: ClassVar[Stage] = Stage.PLACED

    def run(self, flow: Flow, context: PassContext) -> Flow:
        pools = _pools(context)
        _refuse_not_yet(pools, context)
        if context.has_errors:
            return flow
        pinned = {node_id: place for place in context.schedule.places for node_id in place.nodes}
        homes = _homes(flow, pinned, pools, context)
        if context.has_errors:
            return flow
        layouts = _layouts(flow, pinned, homes, pools, context)
        nodes: dict[str, Node] = {}
        for node in flow.nodes.values():
            placement = Placement(FUNCTIONS_POOL)
            if not isinstance(node.op, Score):
                placement = Placement(homes[node.id], layouts.get(node.id))
            nodes[node.id] = replace(node, placement=placement)
        used = {name: pool for name, pool in pools.items() if name in homes.values()}
        if any(isinstance(node.op, Score) for node in flow.nodes.values()):
            workers = max([1, *(place.workers or 1 for place in context.schedule.places)])
            host = next(iter(pools.values())).host_of_rank[0]
            used[FUNCTIONS_POOL] = PoolSpec(FUNCTIONS_POOL, "functions", (host,) * workers)
        placed = replace(flow, stage=self.ensures, nodes=nodes, pools=used)
        if not context.has_errors:
            _check_split(placed, context)
        return placed


def _pools(context: PassContext) -> dict[str, PoolSpec]:
    """The pools with the hosts of their ranks; more devices than the cluster has are an error."""
    cluster = context.cluster
    requests = context.schedule.pools or (PoolRequest(DEFAULT_POOL, cluster.hosts[0].devices),)
    device = torch_device(cluster.hosts[0].device)
    if cluster.name == LOCAL:
        return {r.name: PoolSpec(r.name, device, (LOCAL,) * r.devices, r.span) for r in requests}
    slots = [host.name for host in cluster.hosts for _ in range(host.devices)]
    wanted = sum(request.devices for request in requests)
    if wanted > len(slots):
        table = ", ".join(f"{host.name}: {host.devices}" for host in cluster.hosts[:8])
        table += ", ..." if len(cluster.hosts) > 8 else ""
        subject = f"pool `{requests[0].name}` wants" if len(requests) == 1 else f"{len(requests)} pools want"
        notes = [f"devices by host: {table}"]
        if len(requests) > 1:
            notes.insert(0, "wanted: " + ", ".join(f"`{r.name}` {r.devices}" for r in requests))
        context.error(
            "RLF2003",
            f"{subject} {wanted} devices, and cluster `{cluster.name}` has {len(slots)}",
            requests[-1].span,
            related=() if cluster.span is None else (Label(cluster.span, "", primary=False),),
            notes=tuple(notes),
            help=(f"at most `{len(slots)} devices`" + (" in all" if len(requests) > 1 else ""),),
        )
        return {r.name: PoolSpec(r.name, device, (slots[0],), r.span) for r in requests}
    pools: dict[str, PoolSpec] = {}
    for request in requests:
        pools[request.name] = PoolSpec(request.name, device, tuple(slots[: request.devices]), request.span)
        del slots[: request.devices]
    return pools


def _refuse_not_yet(pools: dict[str, PoolSpec], context: PassContext) -> None:
    """What this version cannot plan is refused, never ignored."""
    cluster = context.cluster
    kinds = sorted({host.device for host in cluster.hosts})
    if len(kinds) > 1:
        context.error(
            "RLF4003",
            f"cluster `{cluster.name}` has several kinds of devices, which this version does not support: "
            + " and ".join(f"`{kind}`" for kind in kinds),
            cluster.span,
        )
    for trigger in context.schedule.triggers:
        context.error("RLF4003", "this version does not plan triggers yet", trigger.span, help=("leave this line out",))
    for request in context.schedule.staleness:
        if request.steps > 0 and len(pools) == 1:
            context.error(
                "RLF4003",
                "staleness needs rollout and training on separate pools, and this schedule has one",
                request.span,
                help=("leave this line out: on one pool every sample is fresh",),
            )
        if request.admit != "in_order":
            context.error("RLF4003", f"this version plans `admit in_order` only, not `{request.admit}`", request.span)


def _homes(
    flow: Flow, pinned: dict[str, PlaceRequest], pools: dict[str, PoolSpec], context: PassContext
) -> dict[str, str]:
    """Stage to pool. A Python stage's home is the pool that calls it: the one whose rows it scores."""
    if len(pools) == 1:
        return dict.fromkeys(flow.nodes, next(iter(pools)))
    homes = {
        node_id: place.pool
        for node_id, place in pinned.items()
        if place.pool in pools and not isinstance(flow.nodes[node_id].op, Score)
    }
    of_model: dict[tuple[str, bool], str] = {}
    for node_id, pool in homes.items():
        model = reads_model(flow.nodes[node_id].op)
        if model is not None:
            of_model.setdefault((model, isinstance(flow.nodes[node_id].op, Generate)), pool)
    for node in flow.nodes.values():
        model = reads_model(node.op)
        if model is None or node.id in homes:
            continue
        sampling = isinstance(node.op, Generate)
        home = of_model.get((model, sampling)) or of_model.get((model, not sampling))
        if home is None:
            context.error(
                "RLF2005",
                f"`{node.id}` of model `{model}` is on none of the {len(pools)} pools",
                node.span,
                help=(f"`place {model} on {next(iter(pools))}`",),
            )
            continue
        homes[node.id] = home
    if context.has_errors:
        return homes
    readers: dict[str, list[str]] = {}
    sources: dict[str, list[str]] = {}
    for edge in flow.edges:
        if edge.kind is EdgeKind.DATA:
            readers.setdefault(edge.src, []).append(edge.dst)
            sources.setdefault(edge.dst, []).append(edge.src)
    phases = (STEP, *(evaluation.name for evaluation in flow.evaluations))
    order = [node_id for phase in phases for node_id in flow.topological_order(phase)]
    for node_id in reversed(order):  # what is read lives with its first reader
        if node_id not in homes and not isinstance(flow.nodes[node_id].op, Score):
            found = [homes[reader] for reader in readers.get(node_id, ()) if reader in homes]
            if found:
                homes[node_id] = found[0]
    for node_id in order:  # the rest, and the calls of rewards, with what they read
        if node_id not in homes:
            found = [homes[source] for source in sources.get(node_id, ()) if source in homes]
            homes[node_id] = found[0] if found else next(iter(pools))
    return homes


def _layouts(
    flow: Flow,
    pinned: dict[str, PlaceRequest],
    homes: dict[str, str],
    pools: dict[str, PoolSpec],
    context: PassContext,
) -> dict[str, Layout]:
    """The sharding of every model stage. A stage that is not pinned is sharded as its model is on that pool."""
    requests: dict[tuple[str, str], PlaceRequest] = {}
    for node_id, place in pinned.items():
        model = reads_model(flow.nodes[node_id].op)
        if model is not None:
            requests.setdefault((model, place.pool), place)
    layouts: dict[str, Layout] = {}
    reported: set[tuple[str, str]] = set()
    for node in flow.nodes.values():
        model = reads_model(node.op)
        if model is None:
            continue
        pool = homes[node.id]
        request = pinned.get(node.id) or requests.get((model, pool))
        size = len(pools[pool].host_of_rank)
        layouts[node.id], violations = layout_of(request, size, pool, model, context.shapes.get(model))
        for violation in violations:
            key = (violation.message, str(violation.span))
            if key not in reported:
                reported.add(key)
                context.error("RLF2001", violation.message, violation.span, help=violation.help)
    return layouts


def _check_split(flow: Flow, context: PassContext) -> None:
    """Whole groups go to data-parallel replicas in equal numbers, and every mini-batch splits over them."""
    for node in flow.nodes.values():
        op = node.op
        dp = _replicas(flow, node)
        # An evaluation counts every row once on whichever rank has it: it needs no equal shares.
        if isinstance(op, Take) and node.phase == STEP and op.count is not None and op.count % dp:
            below, above = op.count // dp * dp, (op.count // dp + 1) * dp
            legal = f"{below} or {above}" if below else f"{above}"
            context.error(
                "RLF2001",
                f"{op.count} prompt{' does' if op.count == 1 else 's do'} not divide over {dp} data-parallel ranks "
                f"of pool `{_pool_name(node)}`",
                node.span,
                help=(f"nearest that divide: {legal} prompts",),
            )
        if isinstance(op, Train) and op.minibatch % dp:
            rows = flow.nodes[flow.inputs(node.id)["samples"]].type
            assert isinstance(rows, RowsType)
            nearest = _nearest_minibatches(rows.rows or 0, op.minibatch, dp)
            context.error(
                "RLF2001",
                f"a mini-batch of {op.minibatch} sample{'s' if op.minibatch != 1 else ''} does not divide over {dp} "
                "data-parallel ranks",
                node.span,
                help=(f"nearest that divide: {' or '.join(map(str, nearest))} samples",) if nearest else (),
            )


def _nearest_minibatches(rows: int, size: int, dp: int) -> list[int]:
    """Up to two sizes, the nearest below and above, that divide the batch and split over the ranks."""
    if rows % dp:
        return []
    of, near, reach = rows // dp, size // dp, 1_000_000
    below = next((d for d in range(near, max(0, near - reach), -1) if of % d == 0), None)
    above = next((d for d in range(near + 1, min(of, near + reach) + 1) if of % d == 0), None)
    return [d * dp for d in (below, above) if d is not None]


def _replicas(flow: Flow, node: Node) -> int:
    """Data-parallel replicas that share a stage's rows: for `take`, those of the stages that read it."""
    if node.placement is not None and node.placement.layout is not None:
        return node.placement.layout.dp
    read = [flow.nodes[e.dst] for e in flow.edges if e.src == node.id and e.kind is EdgeKind.DATA]
    return max((n.placement.layout.dp for n in read if n.placement and n.placement.layout), default=1)


def _pool_name(node: Node) -> str:
    return node.placement.pool if node.placement else ""
