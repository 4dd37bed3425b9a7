"""place: every stage to a pool, colocated; Python stages to CPU workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from rlflow.cluster.spec import DEVICE_TYPES, LOCAL, PlaceRequest, PoolRequest, StalenessRequest, TriggerRequest
from rlflow.diagnostics import Label
from rlflow.ir.flow import Flow, Layout, Node, Placement, PoolSpec, Stage, reads_model
from rlflow.ir.ops import Score, Take, Train
from rlflow.ir.typesystem import RowsType
from rlflow.passes.base import Pass, PassContext

DEFAULT_POOL = "main"
FUNCTIONS_POOL = "cpu"


@dataclass(frozen=True, slots=True)
class Place(Pass):
    """Put all model stages on one pool with data parallelism over its ranks (colocated), rewards on CPU workers."""

    name: ClassVar[str] = "place"
    requires: ClassVar[Stage] = Stage.LOGICAL
    ensures: ClassVar[Stage] = Stage.PLACED

    def run(self, flow: Flow, context: PassContext) -> Flow:
        pool = self._pool(flow, context)
        workers = 1
        for place in context.schedule.places:
            workers = place.workers or workers
            if place.pool != FUNCTIONS_POOL:
                self._check_sharding(place, pool, context)
        if context.has_errors:
            return flow
        size = len(pool.host_of_rank)
        nodes: dict[str, Node] = {}
        has_functions = False
        for node in flow.nodes.values():
            if isinstance(node.op, Score):
                has_functions = True
                nodes[node.id] = replace(node, placement=Placement(FUNCTIONS_POOL))
            elif reads_model(node.op) is not None:
                nodes[node.id] = replace(node, placement=Placement(pool.name, Layout(dp=size)))
            else:
                nodes[node.id] = replace(node, placement=Placement(pool.name))
        pools = {pool.name: pool}
        if has_functions:
            host = pool.host_of_rank[0]
            pools[FUNCTIONS_POOL] = PoolSpec(FUNCTIONS_POOL, "functions", (host,) * workers)
        placed = replace(flow, stage=self.ensures, nodes=nodes, pools=pools)
        _check_split(placed, size, context)
        return placed

    def _pool(self, flow: Flow, context: PassContext) -> PoolSpec:
        schedule, cluster = context.schedule, context.cluster
        if len(schedule.pools) > 1:
            names = " and ".join(f"`{p.name}`" for p in schedule.pools)
            context.error(
                "RLF4003",
                f"this version places a flow on one pool, and the schedule has {len(schedule.pools)}: {names}",
                schedule.pools[1].span,
                help=("use one pool, or leave the schedule out",),
            )
        requests: list[StalenessRequest | TriggerRequest] = [*schedule.staleness, *schedule.triggers]
        for request in requests:
            what = "staleness" if isinstance(request, StalenessRequest) else "a trigger"
            if isinstance(request, TriggerRequest) or request.steps > 0:
                context.error(
                    "RLF4003",
                    f"{what} needs rollout and training on separate pools, which this version does not place yet",
                    request.span,
                    help=("leave this line out: on one pool every sample is fresh",),
                )
        request_ = schedule.pools[0] if schedule.pools else PoolRequest(DEFAULT_POOL, cluster.hosts[0].devices)
        kinds = sorted({host.device for host in cluster.hosts})
        device = DEVICE_TYPES[kinds[0]]
        if len(kinds) > 1:
            context.error(
                "RLF4003",
                f"cluster `{cluster.name}` has several kinds of devices, which this version does not support: "
                + " and ".join(f"`{kind}`" for kind in kinds),
                cluster.span,
            )
        if cluster.name == LOCAL:
            return PoolSpec(request_.name, device, (LOCAL,) * request_.devices, request_.span)
        slots = [host.name for host in cluster.hosts for _ in range(host.devices)]
        if request_.devices > len(slots):
            table = ", ".join(f"{host.name}: {host.devices}" for host in cluster.hosts[:8])
            table += ", ..." if len(cluster.hosts) > 8 else ""
            wanted = f"pool `{request_.name}` wants {request_.devices} devices"
            context.error(
                "RLF2003",
                f"{wanted}, and cluster `{cluster.name}` has {len(slots)}",
                request_.span,
                related=() if cluster.span is None else (Label(cluster.span, "", primary=False),),
                notes=(f"devices by host: {table}",),
                help=(f"at most `{len(slots)} devices`",),
            )
            return PoolSpec(request_.name, device, (slots[0],), request_.span)
        return PoolSpec(request_.name, device, tuple(slots[: request_.devices]), request_.span)

    def _check_sharding(self, place: PlaceRequest, pool: PoolSpec, context: PassContext) -> None:
        size = len(pool.host_of_rank)
        for axis in ("tp", "pp"):
            wanted = getattr(place, axis)
            if wanted is not None and wanted > 1:
                context.error(
                    "RLF4003",
                    f"`{axis} = {wanted}` is not supported yet: this version only uses data parallelism",
                    place.settings.get(axis, place.span),
                )
        if place.dp is not None and place.dp != size:
            context.error(
                "RLF2001",
                f"`dp = {place.dp}` does not fill pool `{pool.name}` of {size} device{'s' if size != 1 else ''}",
                place.settings.get("dp", place.span),
                help=(f"`dp = {size}`, or a pool of {place.dp} devices",),
            )


def _check_split(flow: Flow, dp: int, context: PassContext) -> None:
    """Whole groups go to ranks in equal numbers, and every mini-batch splits over them."""
    if dp == 1:
        return
    for node in flow.nodes.values():
        op = node.op
        if isinstance(op, Take) and op.count is not None and op.count % dp:
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


def _pool_name(node: Node) -> str:
    return node.placement.pool if node.placement else ""
