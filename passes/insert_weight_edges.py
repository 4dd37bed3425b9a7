"""insert-weight-edges: from every train stage to the stages that read the weights it makes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from rlflow.diagnostics import Label
from rlflow.ir.flow import STEP, Edge, EdgeKind, Flow, Node, Stage, reads_model
from rlflow.ir.ops import Train
from rlflow.passes.base import Pass, PassContext


@dataclass(frozen=True, slots=True)
class InsertWeightEdges(Pass):
    """Add the weight edges, each with one initial token (the weights the run starts from), and keep readers in front.

    With s = 0 steps of staleness a reader of step i uses version i, made by the training of step i - 1: one token. With
    s > 0, which takes a pool of its own, it may use a version up to s steps older: 1 + s tokens. In
    the same step a reader must run before the training that replaces its weights: an order edge where the data do
    not say so already.
    """

    name: ClassVar[str] = "insert-weight-edges"
    requires: ClassVar[Stage] = Stage.PLACED
    ensures: ClassVar[Stage] = Stage.PHYSICAL

    def run(self, flow: Flow, context: PassContext) -> Flow:
        edges = list(flow.edges)
        trainers: dict[str, Node] = {}
        for node in flow.nodes.values():
            if not isinstance(node.op, Train):
                continue
            first = trainers.setdefault(node.op.model, node)
            if first is not node:
                context.error(
                    "RLF4003",
                    f"`{node.op.model}` is trained twice in one step, which this version does not support",
                    node.span,
                    related=() if first.span is None else (Label(first.span, "first here", primary=False),),
                )
        if context.has_errors:
            return flow
        permitted = {request.model: request.steps for request in context.schedule.staleness}
        for model, trainer in trainers.items():
            before = _ancestors(flow, trainer.id)
            for node in flow.nodes.values():
                if reads_model(node.op) != model or node.id == trainer.id:
                    continue
                apart = _pool(node) != _pool(trainer)
                stale = permitted.get(model, 0) if apart and node.phase == STEP else 0
                edges.append(Edge(trainer.id, node.id, EdgeKind.WEIGHTS, tokens=1 + stale, span=trainer.span))
                if node.phase == STEP and node.id not in before and not stale:
                    edges.append(Edge(node.id, trainer.id, EdgeKind.ORDER, span=node.span))
        return replace(flow, stage=self.ensures, edges=tuple(edges))


def _pool(node: Node) -> str:
    return "" if node.placement is None else node.placement.pool


def _ancestors(flow: Flow, node_id: str) -> set[str]:
    """Everything the node's data depend on within the step."""
    sources: dict[str, list[str]] = {}
    for edge in flow.edges:
        if edge.kind is EdgeKind.DATA:
            sources.setdefault(edge.dst, []).append(edge.src)
    found: set[str] = set()
    stack = [node_id]
    while stack:
        for source in sources.get(stack.pop(), []):
            if source not in found:
                found.add(source)
                stack.append(source)
    return found
