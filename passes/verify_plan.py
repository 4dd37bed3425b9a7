"""verify-plan: that the plan can run for ever, that its groups fit the hardware, and what limits a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from rlflow.amounts import whole_us
from rlflow.diagnostics import Label, Span
from rlflow.ir.decisions import Cadence, Estimate, Stale
from rlflow.ir.flow import STEP, Flow, Stage, reads_model
from rlflow.passes.base import Pass, PassContext
from rlflow.values import dataclass

if TYPE_CHECKING:
    from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenGraph


@dataclass(frozen=True, slots=True)
class VerifyPlan(Pass):
    """Prove the steady state on the token graph.

    A cycle without a token can never start: an error that names the cycle in the user's places. Otherwise the period is
    the largest ratio of seconds to tokens over all cycles (Reiter 1968); the cycle that sets it is the bottleneck, and
    how much longer every stage may take without changing it is its slack. Without estimates of all model stages only
    the first is said. A flow on one pool runs its stages one after the other and needs no proof.
    """

    name: ClassVar[str] = "verify-plan"
    requires: ClassVar[Stage] = Stage.SCHEDULED
    ensures: ClassVar[Stage] = Stage.SCHEDULED

    def run(self, flow: Flow, context: PassContext) -> Flow:
        estimated = {estimate.stage for estimate in flow.decided(Estimate)}
        models = [node.id for node in flow.phase_nodes(STEP) if reads_model(node.op) is not None]
        pools = [pool for pool in flow.pools.values() if pool.device != "functions"]
        complete = bool(models) and all(stage in estimated for stage in models)
        if any(pool.device in ("npu", "cuda") for pool in pools):
            from rlflow.passes.analysis.costs import Costs
            from rlflow.passes.analysis.topology import check_groups

            check_groups(flow, Costs(flow, context), context)
        if len(pools) < 2 and not complete:
            return flow
        from rlflow.passes.analysis.steady import token_graph
        from rlflow.passes.analysis.tokens.liveness import empty_cycle

        graph = token_graph(flow)
        dead = empty_cycle(graph)
        if dead is not None:
            _report(dead, context)
            return flow
        if not complete:
            return flow
        return replace(flow, decisions=(*flow.decisions, _cadence(flow, graph)))


def _cadence(flow: Flow, graph: TokenGraph) -> Cadence:
    from rlflow.passes.analysis.steady import without_idle
    from rlflow.passes.analysis.tokens.bottleneck import bottleneck
    from rlflow.passes.analysis.tokens.graph import TokenEdgeKind
    from rlflow.passes.analysis.tokens.period import period
    from rlflow.passes.analysis.tokens.slack import slack
    from rlflow.passes.analysis.tokens.staleness import least_useful_staleness

    graph = without_idle(graph)
    found = period(graph)
    limit = bottleneck(graph, found)
    spare = slack(graph, found)
    useful = []
    for stale in flow.decided(Stale):
        edges = [
            edge
            for edge in graph.edges
            if edge.kind is TokenEdgeKind.WEIGHTS and edge.tokens and _leads_to(graph, edge, stale.stage)
        ]
        least = least_useful_staleness(graph, edges) if edges else None
        if least is not None:
            useful.append((stale.model, least))
    return Cadence(
        us=whole_us(found.value),
        cycle=tuple(edge.src for edge in limit.cycle),
        cycle_us=tuple(whole_us(seconds) for seconds in limit.durations),
        tokens=limit.tokens,
        slack=tuple((name, whole_us(more)) for name, more in spare.items() if more is not None and name in flow.nodes),
        one_more_token=tuple(
            (edge.label or edge.text, whole_us(then)) for edge, then in limit.one_more_token if then < found.value
        ),
        without=tuple((name, whole_us(then)) for name, then in limit.without if then < found.value),
        useful_staleness=tuple(useful),
        span=flow.span,
    )


def _leads_to(graph: TokenGraph, edge: TokenEdge, stage: str) -> bool:
    """Whether the weights of the edge are those that the stage reads, directly or through a reshard."""
    return edge.dst == stage or any(e.src == edge.dst and e.dst == stage and e.label == "weights" for e in graph.edges)


def _report(cycle: Sequence[TokenEdge], context: PassContext) -> None:
    """The cycle, every edge of it with the place that caused it."""
    names = " -> ".join([*(edge.src for edge in cycle), cycle[0].src])
    labels = [
        Label(edge.tag, f"{edge.dst} waits for {edge.src}" + (f" ({edge.label})" if edge.label else ""), primary=False)
        for edge in cycle
        if isinstance(edge.tag, Span)
    ]
    first = labels[0].span if labels else None
    context.error(
        "RLF3007",
        f"these wait for each other for ever: {names}",
        first,
        related=tuple(labels[1:]),
        notes=("no edge of the cycle has a token, so that none of its stages can start",),
        help=("staleness on the weights, or a queue of more batches, puts a token on the cycle",),
    )
