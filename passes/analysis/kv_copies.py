"""Key-value heads that several ranks hold, since there are fewer of them than ranks that attention is cut over."""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.ir.decisions import KvCopies
from rlflow.ir.flow import Flow, reads_model
from rlflow.passes.base import PassContext


def kv_copies(flow: Flow, context: PassContext) -> Iterator[KvCopies]:
    """For every model stage whose tp x cp is above the key-value heads of its model, where those are known.

    Of the placed flow, after the rules of layouts have been checked: the ranks are a multiple of the heads.
    """
    for node in flow.nodes.values():
        model = reads_model(node.op)
        shape = None if model is None else context.shapes.get(model)
        layout = None if node.placement is None else node.placement.layout
        if shape is not None and layout is not None and layout.tp * layout.cp > shape.kv_heads:
            copies = layout.tp * layout.cp // shape.kv_heads
            yield KvCopies(stage=node.id, kv_heads=shape.kv_heads, copies=copies, span=node.span)
