"""place: every stage to a pool; Python stages to CPU workers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rlflow.cluster.spec import PlaceRequest
from rlflow.diagnostics import Span
from rlflow.ir.flow import STEP, EdgeKind, Flow, Node, Placement, PoolSpec, Stage, reads_model
from rlflow.ir.ops import BestOf, BestWorst, Generate, MixedGroups, Score
from rlflow.ir.order import phase_orders
from rlflow.passes.analysis.host_cpus import check_demands, demands
from rlflow.passes.analysis.pools import allocate_pools
from rlflow.passes.analysis.workers import host_tiers, report_workers, spread
from rlflow.passes.base import Pass, PassContext
from rlflow.values import dataclass

FUNCTIONS_POOL = "cpu"


@dataclass(frozen=True, slots=True)
class Place(Pass):
    """Put every stage on a pool: pinned stages where the schedule says, the others with those they work for.

    Without pools in the schedule everything is colocated on one. Devices are given to pools host by host, in order.
    Rewards run on CPU workers, spread over the hosts that have CPUs left.
    """

    name: ClassVar[str] = "place"
    requires: ClassVar[Stage] = Stage.LOGICAL
    ensures: ClassVar[Stage] = Stage.PLACED

    def run(self, flow: Flow, context: PassContext) -> Flow:
        pools = allocate_pools(context)
        if context.has_errors:
            return flow
        pinned = context.pins(flow)
        homes = _homes(flow, pinned, pools, context)
        if context.has_errors:
            return flow
        nodes: dict[str, Node] = {}
        for node in flow.nodes.values():
            placement = Placement(FUNCTIONS_POOL)
            if not isinstance(node.op, Score):
                placement = Placement(homes[node.id])
            nodes[node.id] = replace(node, placement=placement)
        used = {name: pool for name, pool in pools.items() if name in homes.values()}
        for name, pool in pools.items():
            if name not in used:
                context.warn(
                    "RLF2007",
                    f"nothing runs on pool `{name}`: its {len(pool.host_of_rank)} devices stay idle",
                    pool.span,
                    help=(f"`place ... on {name}`, or leave the pool out",),
                )
        placed = replace(flow, stage=self.ensures, nodes=nodes, pools=used)
        found = demands(placed, context)
        workers, span = _workers(placed, context)
        check_demands(placed, found, workers, context)
        if context.has_errors or not workers:
            return placed
        hosts = spread(workers, host_tiers(placed, context), found)
        if hosts is None:
            report_workers(workers, span, found, placed, context)
            return placed
        return replace(placed, pools={**used, FUNCTIONS_POOL: PoolSpec(FUNCTIONS_POOL, "functions", hosts)})


def _workers(flow: Flow, context: PassContext) -> tuple[int, Span | None]:
    """CPU workers of Python stages, and where their number was written; 0 where there are no such stages."""
    if not any(isinstance(node.op, Score) for node in flow.nodes.values()):
        return 0, None
    places = [place for place in context.schedule.places if place.workers]
    most = max(places, key=lambda place: place.workers or 0, default=None)
    return (1, None) if most is None else (most.workers or 1, most.settings.get("workers", most.span))


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
    orders, _ = phase_orders(flow)
    order = [node_id for phase in phases for node_id in orders.get(phase, ())]
    for node_id in order:  # a selection lives where its samples are made: what it drops need not travel, and it refills
        made = _samples_of(flow, node_id, sources) if isinstance(flow.nodes[node_id].op, _SELECTIONS) else None
        if made in homes and node_id not in homes:
            homes[node_id] = homes[made]
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


_SELECTIONS = (BestOf, BestWorst, MixedGroups)


def _samples_of(flow: Flow, node_id: str, sources: dict[str, list[str]]) -> str | None:
    """The nearest stage before a selection that generates."""
    queue, seen = [node_id], set()
    while queue:
        for source in sources.get(queue.pop(0), ()):
            if isinstance(flow.nodes[source].op, Generate):
                return source
            if source not in seen:
                seen.add(source)
                queue.append(source)
    return None
