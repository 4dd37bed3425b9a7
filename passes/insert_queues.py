"""insert-queues: a queue for every result that another pool reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from rlflow.ir.decisions import QueueSpec, Stale
from rlflow.ir.flow import STEP, Flow, Stage
from rlflow.passes.analysis.crossings import crossings
from rlflow.passes.analysis.homes import homes_of
from rlflow.passes.base import Pass, PassContext
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class InsertQueues(Pass):
    """Every data edge between pools becomes a queue.

    Its capacity follows from the tokens of the weight edges: under a gate that admits s batches ahead, no queue ever
    holds more than s + 1 of them, so that more room is never used and less would hold the producer back (a schedule may
    ask for less: `depth`). Each data-parallel replica that writes fills a partition of its own; a model-parallel
    replica of the reading pool reads once, and hands the rows on inside.
    """

    name: ClassVar[str] = "insert-queues"
    requires: ClassVar[Stage] = Stage.PHYSICAL
    ensures: ClassVar[Stage] = Stage.PHYSICAL

    def run(self, flow: Flow, context: PassContext) -> Flow:
        depth = {request.model: request.depth for request in context.schedule.staleness}
        return replace(flow, decisions=(*flow.decisions, *_queues(flow, depth)))


def _queues(flow: Flow, depth: dict[str, int | None]) -> Iterator[QueueSpec]:
    homes = homes_of(flow)
    stale = {decision.stage: decision for decision in flow.decided(Stale)}
    steps = max((decision.steps for decision in stale.values()), default=0)
    asked = [wanted for decision in stale.values() if (wanted := depth.get(decision.model)) is not None]
    abroad = crossings(flow)
    for node in flow.nodes.values():
        for pool, reader in abroad.get(node.id, {}).items():
            ahead = steps if node.phase == STEP else 0
            samples = stale.get(node.id)
            yield QueueSpec(
                id=f"{node.id}->{pool}",
                stage=node.id,
                source=homes[node.id],
                target=pool,
                capacity=min(1 + ahead, *asked) if asked and node.phase == STEP else 1 + ahead,
                reads=_replicas(flow, pool),
                partitions=_replicas(flow, homes[node.id]),
                trigger=1.0 if samples is None else samples.trigger,
                carry="finish" if samples is None else samples.carry,
                span=reader.span,
            )


def _replicas(flow: Flow, pool: str) -> int:
    """Model-parallel replicas of a pool: the most that any of its stages has."""
    placed = (node.placement for node in flow.nodes.values())
    layouts = [p.layout for p in placed if p is not None and p.pool == pool and p.layout is not None]
    return max((layout.dp for layout in layouts), default=1)
