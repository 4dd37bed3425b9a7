"""Optimizer updates of a training stage in one step."""

from __future__ import annotations

from rlflow.ir.flow import Flow, Node
from rlflow.ir.ops import Train
from rlflow.ir.typesystem import RowsType


def updates_of(flow: Flow, trainer: Node) -> int:
    """Mini-batches of a batch times epochs. Where a selection decides in the run how many rows there are, the most that
    there can be: those of the samples that it selects from."""
    op = trainer.op
    assert isinstance(op, Train)
    return op.epochs * max(1, -(-_most_rows(flow, trainer) // op.minibatch) if op.minibatch else 1)


def _most_rows(flow: Flow, node: Node) -> int:
    """Rows that the stage reads; 0 where nothing on the way says how many."""
    while True:
        inputs = flow.inputs(node.id)
        above = inputs.get("samples") or inputs.get("prompts")
        if above is None:
            return 0
        node = flow.nodes[above]
        if isinstance(node.type, RowsType) and node.type.rows is not None:
            return node.type.rows
