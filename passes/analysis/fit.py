"""Open settings of training, chosen so that one device can hold what an update needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rlflow.amounts import GIB, gib
from rlflow.cluster.spec import PlaceRequest
from rlflow.ir.decisions import Choice
from rlflow.ir.flow import Flow, Layout, Node, PoolSpec
from rlflow.ir.ops import Train
from rlflow.passes.base import PassContext

if TYPE_CHECKING:
    from rlflow.cost.machine import Machine
    from rlflow.passes.analysis.costs import Costs

RESERVED_SHARE = 0.05
"""Of a device's memory: the runtime's own context, communication buffers, and what an allocator cannot use."""
_RECOMPUTE = ("none", "selective", "full")


def usable_bytes(pool: PoolSpec, on: Machine, context: PassContext) -> int:
    """What stages may use of one device's memory: what the schedule says, or all but a reserve."""
    asked = next((request.memory_bytes for request in context.schedule.pools if request.name == pool.name), None)
    return asked or on.memory_bytes - round(on.memory_bytes * RESERVED_SHARE)


def check_memory(flow: Flow, costs: Costs, context: PassContext) -> None:
    """A pool cannot have more memory than its devices."""
    for request in context.schedule.pools:
        pool = flow.pools.get(request.name)
        on = None if pool is None or request.memory_bytes is None else costs.machine(pool)
        if on is not None and request.memory_bytes is not None and request.memory_bytes > on.memory_bytes:
            context.error(
                "RLF1010",
                f"pool `{request.name}` asks for {gib(request.memory_bytes)} of a device, and "
                f"`{on.device.name}` has {gib(on.memory_bytes)}",
                request.span,
                help=(f"at most `memory = {int(on.memory_bytes / GIB)} GiB`",),
            )


def fit_training(flow: Flow, requests: dict[str, PlaceRequest | None], costs: Costs, context: PassContext) -> Flow:
    """The flow with `recompute` and `zero` of training raised where they are open and an update would not fit.

    Of those that fit, the first in the order of what they cost: computing attention again, then every layer, then
    sharding gradients and weights over the replicas. Where none fits, the one that needs least; the memory table says
    by how much it is too large.
    """
    for node in list(flow.nodes.values()):
        if not isinstance(node.op, Train) or node.placement is None or node.placement.layout is None:
            continue
        pool = flow.pools[node.placement.pool]
        on = costs.machine(pool)
        if on is None or costs.model(node.op.model) is None:
            continue
        room = usable_bytes(pool, on, context)
        candidates = list(_candidates(node.placement.layout, requests.get(node.id)))
        fitting = (layout for layout in candidates if _peak(node, layout, costs) <= room)
        chosen = next(fitting, None) or min(candidates, key=lambda layout: _peak(node, layout, costs))
        if chosen == node.placement.layout:
            continue
        flow = flow.with_nodes(replace(node, placement=replace(node.placement, layout=chosen)))
        needed = _peak(node, node.placement.layout, costs)
        choice = Choice(
            what=f"memory settings of {node.id}",
            chosen=_text(chosen),
            runner_up=_text(node.placement.layout),
            reason=f"does not fit: {gib(needed)} a device, and a device has {gib(room)}",
            span=node.span,
        )
        flow = replace(flow, decisions=(*flow.decisions, choice))
    return flow


def _text(layout: Layout) -> str:
    return f"recompute {layout.recompute}, zero {layout.zero}"


def _peak(node: Node, layout: Layout, costs: Costs) -> int:
    cost = costs.cost(node, layout)
    return 0 if cost is None else cost.peak_bytes


def _candidates(layout: Layout, request: PlaceRequest | None) -> Iterator[Layout]:
    recompute = _RECOMPUTE if request is None or request.recompute is None else (layout.recompute,)
    zero = [layout.zero]
    if (request is None or request.zero is None) and layout.dp * layout.cp > 1:
        zero += range(layout.zero + 1, 4)
    for stage in zero:
        for again in recompute:
            yield replace(layout, recompute=again, zero=stage)  # type: ignore[arg-type]
