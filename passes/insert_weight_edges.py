"""insert-weight-edges: from every train stage to the stages that read the weights it makes."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rlflow.diagnostics import Label
from rlflow.ir.flow import STEP, Edge, EdgeKind, Flow, Node, Stage, reads_model
from rlflow.ir.ops import Train
from rlflow.passes.base import Pass, PassContext
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class InsertWeightEdges(Pass):
    """Add the weight edges, each with one initial token (the weights the run starts from), and keep readers in front.

    A reader of step i uses version i, made by the training of step i - 1; staleness adds tokens later. In the same step
    a reader must run before the training that replaces its weights: an order edge where the data do not say so
    already.
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
        for model, trainer in trainers.items():
            before = _ancestors(flow, trainer.id)
            for node in flow.nodes.values():
                reads = reads_model(node.op)
                if flow.owner_of(reads) != model or node.id == trainer.id:
                    continue
                apart = _pool(node) != _pool(trainer)
                if apart and reads != model:
                    context.error(
                        "RLF4003",
                        f"`{reads}` shares its weights with `{model}`, which trains on the pool `{_pool(trainer)}`",
                        node.span,
                        help=(f"place `{reads}` there too, or leave `shared` out for a value model of its own",),
                    )
                    continue
                edges.append(Edge(trainer.id, node.id, EdgeKind.WEIGHTS, tokens=1, span=trainer.span))
                if node.phase == STEP and node.id not in before:
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
