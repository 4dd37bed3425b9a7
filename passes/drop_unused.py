"""drop-unused: loss terms of weight 0, inputs no term reads, and stages whose results nobody reads."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rlflow.ir.flow import STEP, Edge, EdgeKind, Flow, Node, Stage
from rlflow.ir.losses import NEEDS
from rlflow.ir.ops import Combine, ModelScore, Score, Train
from rlflow.passes.base import Pass, PassContext
from rlflow.values import dataclass

_ALWAYS = frozenset({"samples", "old"})
"""Inputs of a train stage that every loss may read."""


@dataclass(frozen=True, slots=True)
class DropUnused(Pass):
    """Remove what does not change what is learned or reported, so that it costs neither time nor memory.

    With `0 * kl(k3)` the KL term goes, then the `reference` input of `train`, then the reference's stage, and with its
    last stage the reference model is no longer loaded.
    """

    name: ClassVar[str] = "drop-unused"
    requires: ClassVar[Stage] = Stage.LOGICAL
    ensures: ClassVar[Stage] = Stage.LOGICAL

    def run(self, flow: Flow, context: PassContext) -> Flow:
        nodes = {node.id: _without_zero_terms(node) for node in flow.nodes.values()}
        edges = [edge for edge in flow.edges if _is_read(edge, nodes[edge.dst])]
        while True:
            read = {edge.src for edge in edges}
            dead = [node.id for node in nodes.values() if node.id not in read and not _is_kept(node)]
            if not dead:
                return replace(flow, nodes=nodes, edges=tuple(edges))
            for node_id in dead:
                del nodes[node_id]
            edges = [edge for edge in edges if edge.dst in nodes]


def _without_zero_terms(node: Node) -> Node:
    op = node.op
    if not isinstance(op, Train):
        return node
    terms = tuple(term for term in op.loss if term.weight != 0)
    # A loss of nothing but zeros stays as it is: its gradient is 0, and the run will show it.
    return node if not terms or terms == op.loss else replace(node, op=replace(op, loss=terms))


def _is_read(edge: Edge, reader: Node) -> bool:
    if edge.kind is not EdgeKind.DATA or not isinstance(reader.op, Train) or edge.port in _ALWAYS:
        return True
    return any(edge.port in NEEDS[term.kind] for term in reader.op.loss if term.weight != 0)


def _is_kept(node: Node) -> bool:
    """Whether a stage counts without a reader: it trains, or an evaluation reports it."""
    return isinstance(node.op, Train) or (node.phase != STEP and isinstance(node.op, Score | ModelScore | Combine))
