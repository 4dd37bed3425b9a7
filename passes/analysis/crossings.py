"""Which results cross from one pool to another: each of them needs a queue."""

from __future__ import annotations

from rlflow.ir.flow import EdgeKind, Flow, Node
from rlflow.passes.analysis.homes import homes_of


def crossings(flow: Flow) -> dict[str, dict[str, Node]]:
    """Stage to the other pools that read its result, each with the first stage that does, in the order of the edges."""
    homes = homes_of(flow)
    found: dict[str, dict[str, Node]] = {}
    for edge in flow.edges:
        if edge.kind is EdgeKind.DATA and homes[edge.dst] != homes[edge.src]:
            found.setdefault(edge.src, {}).setdefault(homes[edge.dst], flow.nodes[edge.dst])
    return found
