"""insert-old-logprobs: log-probabilities before the first update, where one batch gets several updates."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rlflow.ir.flow import Edge, EdgeKind, Flow, Node, Stage
from rlflow.ir.ops import Cispo, Gspo, Logprobs, PpoClip, Train
from rlflow.ir.typesystem import Field, RowsType
from rlflow.passes.base import Pass, PassContext
from rlflow.values import dataclass

PORT = "old"


@dataclass(frozen=True, slots=True)
class InsertOldLogprobs(Pass):
    """Give a train stage with a ratio loss and more than one update per batch an `old` input.

    With one update per batch the policy that trains is the one that sampled, its ratio is 1 by definition, and
    nothing is inserted. With more, the ratio is against the policy before the first of them, computed by the trainer
    itself, so that it is exactly 1 at the first update.
    """

    name: ClassVar[str] = "insert-old-logprobs"
    requires: ClassVar[Stage] = Stage.LOGICAL
    ensures: ClassVar[Stage] = Stage.LOGICAL

    def run(self, flow: Flow, context: PassContext) -> Flow:
        nodes: dict[str, Node] = {}
        edges = list(flow.edges)
        for node in flow.nodes.values():
            if isinstance(node.op, Train) and self._needs_old(flow, node):
                old, samples = self._old(flow, node)
                nodes[old.id] = old
                edges.append(Edge(samples, old.id, EdgeKind.DATA, "samples", span=node.span))
                edges.append(Edge(old.id, node.id, EdgeKind.DATA, PORT, span=node.span))
            nodes[node.id] = node
        return replace(flow, nodes=nodes, edges=tuple(edges))

    def _needs_old(self, flow: Flow, node: Node) -> bool:
        op = node.op
        assert isinstance(op, Train)
        if PORT in flow.inputs(node.id) or not any(isinstance(term, PpoClip | Gspo | Cispo) for term in op.loss):
            return False
        samples = flow.nodes[flow.inputs(node.id)["samples"]].type
        assert isinstance(samples, RowsType)
        return op.epochs > 1 or samples.rows != op.minibatch

    def _old(self, flow: Flow, node: Node) -> tuple[Node, str]:
        op = node.op
        assert isinstance(op, Train)
        samples = flow.inputs(node.id)["samples"]
        rows = flow.nodes[samples].type
        assert isinstance(rows, RowsType)
        type_ = RowsType("sample", rows.origin, rows.rows, rows.group, (Field("logprobs", "f32", "token"),))
        logprobs = Logprobs(model=op.model, temperature=op.temperature)
        return Node(f"{node.id}.old", logprobs, type_, node.span, inserted_by=self.name), samples
