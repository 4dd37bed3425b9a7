"""Which pool's instruction list runs a stage."""

from __future__ import annotations

from rlflow.ir.flow import EdgeKind, Flow
from rlflow.ir.ops import Score


def homes_of(flow: Flow) -> dict[str, str]:
    """Stage to pool. A Python stage is called by the pool whose rows it scores, not by its workers."""
    samples = {e.dst: e.src for e in flow.edges if e.kind is EdgeKind.DATA and e.port == "samples"}
    homes: dict[str, str] = {}
    for node in flow.nodes.values():
        caller = node
        while isinstance(caller.op, Score):
            caller = flow.nodes[samples[caller.id]]
        assert caller.placement is not None
        homes[node.id] = caller.placement.pool
    return homes
