"""Reshards in place: the layout that is read takes over the memory of the layout that trains, on the same devices.

The weights that are trained are needed again for training, so the host keeps a copy of them meanwhile. A device then
has the larger of the two layouts and the buckets at once, in place of both layouts and the buckets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlflow.amounts import gib
from rlflow.ir.decisions import Choice, Reshard
from rlflow.ir.flow import STEP, Flow, Layout, PoolSpec
from rlflow.passes.base import PassContext

if TYPE_CHECKING:
    from rlflow.cost.components import Precision
    from rlflow.passes.analysis.costs import Costs
    from rlflow.passes.analysis.memory.choice import Infeasible
    from rlflow.reshard.storage import Storage


def storages(layouts: tuple[Layout, Layout], precision: Precision) -> tuple[Storage, Storage]:
    """How both ends keep a model's tensors: a vocabulary that tp does not divide is padded, at each end to a multiple
    of its own tp."""
    from rlflow.reshard.storage import Storage

    dtype = "bfloat16" if precision.weights == 2 else "float32"
    before, after = (Storage(vocabulary_multiple=layout.tp, dtype=dtype, mtp=False) for layout in layouts)
    return before, after


def pinned(reshard: Reshard, context: PassContext) -> str | None:
    """`in_place` or `beside`, where the schedule says so of a stage that reads the copy."""
    asked = (p.reshard for p in context.schedule.places if set(p.nodes) & set(reshard.readers))
    return next((word for word in asked if word is not None), None)


def done_as_pinned(flow: Flow, pool: PoolSpec, swapping: bool, costs: Costs) -> Flow:
    """The flow with the reshards in place that the schedule wants so. An error where one cannot be."""
    context = costs.context
    for reshard in flow.decided(Reshard):
        if reshard.source == reshard.target == pool.name and pinned(reshard, context) == "in_place":
            against = obstacle(flow, reshard, swapping)
            if against is None:
                flow = done_in_place(flow, reshard, costs)
                continue
            place = next(p for p in context.schedule.places if p.reshard and set(p.nodes) & set(reshard.readers))
            code, reason, help = against
            span = place.settings.get("reshard", place.span)
            context.error(code, f"`{reshard.model}` cannot be resharded in place: {reason}", span, help=(help,))
    return flow


def obstacle(flow: Flow, reshard: Reshard, swapping: bool) -> tuple[str, str, str] | None:
    """Code, reason and help, where a reshard between layouts of one pool cannot be in place."""
    others = [r for r in flow.decided(Reshard) if (r.model, r.target) == (reshard.model, reshard.target)]
    evaluated = [reader for reader in reshard.readers if flow.nodes[reader].phase != STEP]
    if not swapping:
        return (
            "RLF2006",
            f"the host keeps the trained weights meanwhile, and swapping is off on pool `{reshard.target}`",
            "`swap = true` on the pool",
        )
    if reshard.adapters:
        return "RLF2006", "only its adapters are sent, and its weights stay as they are", "leave it out"
    if len(others) > 1:
        return (
            "RLF4003",
            f"pool `{reshard.target}` has its weights in {len(others)} further layouts, and the first would overwrite "
            "what the next is made from",
            "one layout for all stages that read it",
        )
    if evaluated:
        return (
            "RLF4003",
            f"`{evaluated[0]}` of evaluation `{flow.nodes[evaluated[0]].phase}` reads the copy too",
            "leave `reshard` out, or the evaluation",
        )
    return None


def next_in_place(
    flow: Flow, pool: PoolSpec, found: Infeasible, swapping: bool, costs: Costs
) -> tuple[Flow, Reshard] | str | None:
    """The flow with one more reshard in place, where that is what does not fit; or why it cannot be."""
    for reshard in flow.decided(Reshard):
        here = reshard.source == reshard.target == pool.name
        if not here or reshard.in_place or found.resource != "device" or found.phase != f"reshard {reshard.id}":
            continue
        if pinned(reshard, costs.context) == "beside":
            return f"`reshard = beside` keeps both layouts of `{reshard.model}`"
        against = obstacle(flow, reshard, swapping)
        if against is not None:
            return f"`{reshard.model}` cannot be resharded in place: {against[1]}"
        return done_in_place(flow, reshard, costs), reshard
    return None


def done_in_place(flow: Flow, reshard: Reshard, costs: Costs) -> Flow:
    """The flow with the reshard in place, and the order of its tensors."""
    from rlflow.reshard.catalogue import catalogue
    from rlflow.reshard.endpoint import Endpoint
    from rlflow.reshard.tensor_order import order_tensors

    placements = flow.nodes[reshard.trainer].placement, flow.nodes[reshard.readers[0]].placement
    here, there = (placement.layout for placement in placements if placement is not None and placement.layout)
    before, after = storages((here, there), costs.precision(reshard.model))
    tensors = catalogue(costs.context.architectures[reshard.model], mtp=False)
    devices = tuple(range(here.size))
    order = order_tensors(
        tensors, Endpoint(here, devices, before), Endpoint(there, reshard.mapping or devices[: there.size], after)
    )
    done = replace(
        reshard,
        in_place=True,
        order=tuple((act.value, tensor) for act, tensor in order.steps),
        bucket_bytes=max(reshard.bucket_bytes, order.staging_bytes),
    )
    return replace(flow, decisions=tuple(done if decision is reshard else decision for decision in flow.decisions))


def chosen(reshard: Reshard, found: Infeasible) -> Choice:
    """Why it is in place."""
    return Choice(
        what=f"reshard of {reshard.model} on {reshard.target}",
        chosen="in place",
        runner_up="beside the trained weights",
        reason=f"does not fit: {gib(found.needed_bytes)} a device, and a device has {gib(found.capacity_bytes)}",
        span=reshard.span,
    )
