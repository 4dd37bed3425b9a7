"""estimate: seconds of every stage, from a profile where there is one, else of model stages by the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from rlflow.ir.decisions import Engine, Estimate, Memory
from rlflow.ir.flow import Flow, Node, Stage, reads_model
from rlflow.ir.ops import Generate
from rlflow.passes.base import Pass, PassContext
from rlflow.values import dataclass

if TYPE_CHECKING:
    from rlflow.passes.analysis.costs import Costs
    from rlflow.passes.analysis.profiled import Unknown


@dataclass(frozen=True, slots=True)
class EstimateStages(Pass):
    """Add the seconds of every stage that the profile knows, and of every other model stage on accelerators, with the
    cache of keys and values that memory leaves it.

    A stage about which something is not known has no estimate. A profile that knows none of the stages is refused, and
    what it does not know of a flow is a warning.
    """

    name: ClassVar[str] = "estimate"
    requires: ClassVar[Stage] = Stage.SCHEDULED
    ensures: ClassVar[Stage] = Stage.SCHEDULED

    def run(self, flow: Flow, context: PassContext) -> Flow:
        measured: list[Estimate] = []
        unknown: list[Unknown] = []
        if context.profile is not None:
            from rlflow.passes.analysis.profiled import from_profile

            measured, unknown = from_profile(flow, context.profile)
        computed: list[Estimate] = []
        if any(pool.device not in ("cpu", "functions") for pool in flow.pools.values()):
            known = {estimate.stage for estimate in measured}
            computed = _computed(flow, context, [node for node in flow.nodes.values() if node.id not in known])
        if context.profile is not None:
            _report(flow, context, [e for e in (*measured, *computed) if e.measured], unknown)
        return replace(flow, decisions=(*flow.decisions, *measured, *computed)) if measured or computed else flow


def _report(flow: Flow, context: PassContext, known: Sequence[Estimate], unknown: Sequence[Unknown]) -> None:
    """What the profile does not know; an error where it knows nothing."""
    if not known:
        first = unknown[0]
        context.error(
            "RLF4006",
            "the profile knows none of the stages as they are here",
            flow.span,
            notes=(f"`{first.stage}`: {first.why}",),
            help=("measure them: `rlflow profile FILE.rlflow -o profile.json`",),
        )
        return
    scaled = {estimate.stage: estimate.measured for estimate in known}
    for stage in unknown:
        context.warn(
            "RLF4007",
            f"the profile does not know how long `{stage.stage}` takes as it is here",
            flow.nodes[stage.stage].span,
            notes=(stage.why, *([f"its time is {scaled[stage.stage]}"] if stage.stage in scaled else [])),
            help=("measure it: `rlflow profile FILE.rlflow -o profile.json`",),
        )


def _computed(flow: Flow, context: PassContext, nodes: Sequence[Node]) -> list[Estimate]:
    """By the cost model; stages that run no model have no estimate."""
    from rlflow.cost.errors import CostError
    from rlflow.passes.analysis.costs import Costs
    from rlflow.passes.analysis.engine_facts import engine_of

    costs = Costs(flow, context)
    found: list[Estimate] = []
    for node in nodes:
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
            scale = costs.factor(node, memory_bytes=memory)
            found.append(
                Estimate(
                    stage=node.id,
                    us=round(cost.seconds * scale * 1e6),
                    parts=tuple((name, round(seconds * scale * 1e6)) for name, seconds in cost.parts),
                    engine=engine if engine is None or scale == 1 else _scaled(engine, scale),
                    measured="" if scale == 1 else _scaled_words(costs, node, scale),
                    span=node.span,
                )
            )
    return found


def _scaled(engine: Engine, scale: float) -> Engine:
    """With all of its seconds multiplied."""
    return replace(
        engine,
        bands=tuple((last, fixed * scale, each * scale) for last, fixed, each in engine.bands),
        token_s=engine.token_s * scale,
        prefill_token_s=engine.prefill_token_s * scale,
        prefill_square_s=engine.prefill_square_s * scale,
        prefill_context_s=engine.prefill_context_s * scale,
    )


def _scaled_words(costs: Costs, node: Node, scale: float) -> str:
    from rlflow.passes.analysis.measured_costs import layout_words

    return f"by the cost model times {scale:.4g}, as measured in the layout {layout_words(costs, node)}"


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
