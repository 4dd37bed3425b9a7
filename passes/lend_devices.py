"""lend-devices: a stage that samples on several pools becomes one stage a pool, with its part of the prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from rlflow.cluster.spec import PlaceRequest
from rlflow.diagnostics import CompileError
from rlflow.ir.decisions import Choice
from rlflow.ir.flow import STEP, Edge, EdgeKind, Flow, Node, Stage
from rlflow.ir.ops import Generate, Join, MixedGroups
from rlflow.ir.typesystem import RowsType
from rlflow.passes.base import Pass, PassContext
from rlflow.values import dataclass

if TYPE_CHECKING:
    from rlflow.passes.analysis.lending import Share


@dataclass(frozen=True, slots=True)
class LendDevices(Pass):
    """Let pools lend their devices to a stage that samples: those of training while that has nothing to do, say.

    Every pool of the stage gets a `generate` with whole groups of the batch, so many that the pools end together (in
    proportion to their speed; what else a pool does beside a staleness of at least one step is taken off first). The
    rows are joined in the order of the prompts, under the name of the stage, so that nothing else changes. Part by part
    the later passes treat it like any other stage: weights, queues, memory, staleness, order.
    """

    name: ClassVar[str] = "lend-devices"
    requires: ClassVar[Stage] = Stage.LOGICAL
    ensures: ClassVar[Stage] = Stage.LOGICAL

    def run(self, flow: Flow, context: PassContext) -> Flow:
        lent = [place for place in context.schedule.places if place.also]
        if not lent:
            return flow
        alone = replace(context.schedule, places=tuple(replace(p, also=()) for p in context.schedule.places))
        stages = [
            (flow.nodes[node_id], place)
            for place in lent
            for node_id in place.nodes
            if node_id in flow.nodes and flow.nodes[node_id].phase == STEP
        ]
        for node, place in stages:
            _check(flow, node, place, context)
        if context.has_errors:
            return flow
        from rlflow.passes.analysis.lending import Lending
        from rlflow.passes.pipeline import run_pipeline

        trial = PassContext(alone, context.cluster, [], context.shapes, context.architectures, context.profile)
        try:
            placed = run_pipeline(flow, trial, ("place", "parallelize"))
        except CompileError:
            context.schedule = alone
            return flow  # the passes that follow will say the same
        lending = Lending(placed, trial)
        for node, place in stages:
            shares = lending.shares(node, place, context)
            if context.has_errors:
                return flow
            flow = _divided(flow, node, place, shares, context)
        return flow


def _check(flow: Flow, node: Node, place: PlaceRequest, context: PassContext) -> None:
    """What is not done on several pools yet."""
    assert isinstance(node.op, Generate)
    assert isinstance(node.type, RowsType)
    reason = ""
    if node.type.rows is None:
        reason = "how many prompts it gets is known only in the run"
    if any(isinstance(other.op, MixedGroups) and other.op.refill for other in flow.phase_nodes(STEP)):
        reason = "its step samples again where groups are too few (`refill`)"
    for trigger in context.schedule.triggers:
        rows = flow.nodes[trigger.node].type if trigger.node in flow.nodes else None
        if isinstance(rows, RowsType) and rows.origin == node.id:
            reason = "training waits for a share of its samples (`trigger`)"
    if reason:
        context.error(
            "RLF4003",
            f"`{node.id}` cannot be on {len(place.also) + 1} pools in this version: {reason}",
            place.span,
            help=(f"place it on `{place.pool}` alone",),
        )


def _divided(flow: Flow, node: Node, place: PlaceRequest, shares: list[Share], context: PassContext) -> Flow:
    """The flow with a stage for every pool that has a share, and the schedule with a line for each."""
    taken = [share for share in shares if share.prompts]
    pools = ", ".join(f"{share.pool} {share.prompts}" for share in shares)
    alternative = shares[0].alternative
    flow = replace(flow, decisions=(*flow.decisions, _choice(node, place, pools, alternative)))
    if len(taken) == 1:
        _place(node.id, {node.id: taken[0].pool}, place, context)
        return flow
    op, type_ = node.op, node.type
    assert isinstance(op, Generate)
    assert isinstance(type_, RowsType)
    parts: dict[str, Node] = {}
    homes: dict[str, str] = {}
    first = 0
    for share in taken:
        part = f"{node.id}.on.{share.pool}"
        rows = replace(type_, origin=part, rows=share.prompts * op.n)
        last = first + share.prompts
        parts[part] = replace(
            node, id=part, op=replace(op, part=(first, last)), type=rows, inserted_by=LendDevices.name
        )
        homes[part] = share.pool
        first = last
    joined = replace(node, op=Join(), inserted_by=LendDevices.name)
    nodes: dict[str, Node] = {}
    for node_id, other in flow.nodes.items():
        nodes |= {**parts, node_id: joined} if node_id == node.id else {node_id: other}
    edges: list[Edge] = []
    for edge in flow.edges:
        edges += [replace(edge, dst=part) for part in parts] if edge.dst == node.id else [edge]
    edges += [Edge(part, node.id, EdgeKind.DATA, f"r{number}", span=node.span) for number, part in enumerate(parts)]
    _place(node.id, homes, place, context)
    return replace(flow, nodes=nodes, edges=tuple(edges))


def _place(stage: str, homes: dict[str, str], place: PlaceRequest, context: PassContext) -> None:
    """In the schedule, every part on its pool in place of the stage."""
    places: list[PlaceRequest] = []
    for other in context.schedule.places:
        if stage not in other.nodes:
            places.append(other)
            continue
        rest = tuple(node for node in other.nodes if node != stage)
        places += [replace(other, nodes=rest)] if rest else []
        places += [replace(place, nodes=(part,), pool=pool, also=()) for part, pool in homes.items()]
    context.schedule = replace(context.schedule, places=tuple(places))


def _choice(node: Node, place: PlaceRequest, pools: str, alternative: tuple[str, str, int]) -> Choice:
    runner_up, reason, loss_us = alternative
    return Choice(
        what=f"prompts of {node.id}",
        chosen=pools,
        runner_up=runner_up,
        reason=reason,
        loss_us=loss_us,
        span=place.span,
    )
