"""schedule: the order in which a pool runs its stages."""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import ClassVar

from rlflow.ir.flow import STEP, EdgeKind, Flow, Node, Stage
from rlflow.ir.ops import Score
from rlflow.passes.base import Pass, PassContext
from rlflow.values import dataclass


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
        needs, late = _needs(flow), _waiting_for_functions(flow)
        for phase in (STEP, *(evaluation.name for evaluation in flow.evaluations)):
            for slot, node_id in enumerate(_order(flow, phase, needs, late)):
                nodes[node_id] = replace(nodes[node_id], slot=slot)
        return replace(flow, stage=self.ensures, nodes=nodes)


def _needs(flow: Flow) -> dict[str, set[str]]:
    """The stages of its phase that must have run before each stage."""
    needs: dict[str, set[str]] = {node_id: set() for node_id in flow.nodes}
    for edge in flow.edges:
        if edge.kind is not EdgeKind.WEIGHTS and flow.nodes[edge.src].phase == flow.nodes[edge.dst].phase:
            needs[edge.dst].add(edge.src)
    return needs


def _order(flow: Flow, phase: str, needs: dict[str, set[str]], late: set[str]) -> list[str]:
    members = [node.id for node in flow.phase_nodes(phase)]
    ranks = {node_id: (_rank(flow.nodes[node_id], late), i, node_id) for i, node_id in enumerate(members)}
    missing = {node_id: len(needs[node_id]) for node_id in members}
    readers: dict[str, list[str]] = {node_id: [] for node_id in members}
    for node_id in members:
        for source in needs[node_id]:
            readers[source].append(node_id)
    ready = [ranks[node_id] for node_id in members if not missing[node_id]]
    heapify(ready)
    order: list[str] = []
    while ready:
        chosen = heappop(ready)[2]
        order.append(chosen)
        for reader in readers[chosen]:
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, ranks[reader])
    return order


def _rank(node: Node, late: set[str]) -> int:
    """Functions first, then stages that need none of their results, then those that do."""
    if isinstance(node.op, Score):
        return 0
    return 2 if node.id in late else 1


def _waiting_for_functions(flow: Flow) -> set[str]:
    """Stages that read, directly or not, what a Python stage computes."""
    readers: dict[str, list[str]] = {}
    for edge in flow.edges:
        if edge.kind is EdgeKind.DATA:
            readers.setdefault(edge.src, []).append(edge.dst)
    late: set[str] = set()
    stack = [node.id for node in flow.nodes.values() if isinstance(node.op, Score)]
    while stack:
        found = [reader for reader in readers.get(stack.pop(), []) if reader not in late]
        late.update(found)
        stack += found
    return late
