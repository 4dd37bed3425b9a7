"""schedule: the order in which a pool runs its stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from rlflow.ir.flow import STEP, EdgeKind, Flow, Node, Stage
from rlflow.ir.ops import Score
from rlflow.passes.base import Pass, PassContext


@dataclass(frozen=True, slots=True)
class ScheduleStages(Pass):
    """Give every node its slot within its phase.

    Python stages start as soon as their input is there and are collected as late as possible, so that they overlap
    with the model stages between; everything else keeps the order in which the user wrote it.
    """

    name: ClassVar[str] = "schedule"
    requires: ClassVar[Stage] = Stage.PHYSICAL
    ensures: ClassVar[Stage] = Stage.SCHEDULED

    def run(self, flow: Flow, context: PassContext) -> Flow:
        nodes = dict(flow.nodes)
        for phase in (STEP, *(evaluation.name for evaluation in flow.evaluations)):
            for slot, node_id in enumerate(_order(flow, phase)):
                nodes[node_id] = replace(nodes[node_id], slot=slot)
        return replace(flow, stage=self.ensures, nodes=nodes)


def _order(flow: Flow, phase: str) -> list[str]:
    members = [node.id for node in flow.phase_nodes(phase)]
    waiting: dict[str, set[str]] = {node_id: set() for node_id in members}
    for edge in flow.edges:
        if edge.kind is not EdgeKind.WEIGHTS and edge.src in waiting and edge.dst in waiting:
            waiting[edge.dst].add(edge.src)
    late = _waits_for_function(flow, members)
    position = {node_id: i for i, node_id in enumerate(members)}
    order: list[str] = []
    while waiting:
        ready = [node_id for node_id, needs in waiting.items() if not needs]
        chosen = min(ready, key=lambda i: (_rank(flow.nodes[i], late), position[i]))
        del waiting[chosen]
        for needs in waiting.values():
            needs.discard(chosen)
        order.append(chosen)
    return order


def _rank(node: Node, late: set[str]) -> int:
    """Functions first, then stages that need none of their results, then those that do."""
    if isinstance(node.op, Score):
        return 0
    return 2 if node.id in late else 1


def _waits_for_function(flow: Flow, members: list[str]) -> set[str]:
    """Stages that read, directly or not, what a Python stage computes."""
    late: set[str] = set()
    for node_id in flow.topological_order(flow.nodes[members[0]].phase) if members else []:
        for source in flow.inputs(node_id).values():
            if source in late or isinstance(flow.nodes[source].op, Score):
                late.add(node_id)
    return late
