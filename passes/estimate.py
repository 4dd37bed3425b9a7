"""estimate: seconds of every model stage, by the cost model."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rlflow.ir.decisions import Estimate, Memory
from rlflow.ir.flow import Flow, Node, Stage, reads_model
from rlflow.ir.ops import Generate
from rlflow.passes.base import Pass, PassContext
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class EstimateStages(Pass):
    """Add the seconds of every model stage on accelerators, with the cache of keys and values that memory leaves it.

    A stage about which something is not known has no estimate.
    """

    name: ClassVar[str] = "estimate"
    requires: ClassVar[Stage] = Stage.SCHEDULED
    ensures: ClassVar[Stage] = Stage.SCHEDULED

    def run(self, flow: Flow, context: PassContext) -> Flow:
        if all(pool.device in ("cpu", "functions") for pool in flow.pools.values()):
            return flow
        from rlflow.cost.errors import CostError
        from rlflow.passes.analysis.costs import Costs
        from rlflow.passes.analysis.engine_facts import engine_of

        costs = Costs(flow, context)
        found: list[Estimate] = []
        for node in flow.nodes.values():
            if reads_model(node.op) is None:
                continue
            memory = _engine_bytes(flow, node)
            try:
                cost = costs.cost(node, memory_bytes=memory)
                engine = engine_of(costs, node, memory) if isinstance(node.op, Generate) else None
            except CostError as error:
                context.error("RLF2001", f"`{node.id}` cannot be laid out: {error}", node.span)
                continue
            if cost is not None:
                parts = tuple((name, round(seconds * 1e6)) for name, seconds in cost.parts)
                found.append(
                    Estimate(stage=node.id, us=round(cost.seconds * 1e6), parts=parts, engine=engine, span=node.span)
                )
        return replace(flow, decisions=(*flow.decisions, *found))


def _engine_bytes(flow: Flow, node: Node) -> int | None:
    """What an engine may take of a device: what the memory table gives its weights, its working memory, its cache."""
    if not isinstance(node.op, Generate) or node.placement is None:
        return None
    for memory in flow.decided(Memory):
        if memory.pool != node.placement.pool:
            continue
        for phase in memory.phases:
            if phase.stage == node.id:
                others = sum(size for name, size in phase.contents if not _is_of(name, node))
                return phase.bytes - others
        return memory.capacity
    return None


def _is_of(name: str, node: Node) -> bool:
    """Whether an object of the memory table belongs to the engine of a generate stage."""
    model = reads_model(node.op)
    return name.startswith((f"{node.id} ", f"{model} weights", f"{model} rollout weights"))
