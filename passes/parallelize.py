"""parallelize: the sharding of every model stage over its pool, and what the sizes of a batch must divide into."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rlflow.cluster.spec import PlaceRequest
from rlflow.ir.flow import Flow, Layout, Node, Stage, reads_model
from rlflow.ir.ops import Generate, Train
from rlflow.passes.analysis.kv_copies import kv_copies
from rlflow.passes.analysis.layouts import Home, layout_of
from rlflow.passes.analysis.splits import check_split
from rlflow.passes.base import Pass, PassContext
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Parallelize(Pass):
    """Give every model stage its layout: pinned axes as they are, data parallelism over what is left.

    A stage that is not pinned is sharded as its model is on that pool. All rules are checked, and all that are broken
    are reported, each with the legal values.
    """

    name: ClassVar[str] = "parallelize"
    requires: ClassVar[Stage] = Stage.PLACED
    ensures: ClassVar[Stage] = Stage.PLACED

    def run(self, flow: Flow, context: PassContext) -> Flow:
        pinned = context.pins(flow)
        _check_training_settings(flow, context)
        layouts = _layouts(flow, pinned, context)
        nodes: dict[str, Node] = {}
        for node in flow.nodes.values():
            assert node.placement is not None
            placement = replace(node.placement, layout=layouts.get(node.id))
            nodes[node.id] = replace(node, placement=placement)
        placed = replace(flow, nodes=nodes)
        if context.has_errors:
            return placed
        check_split(placed, context)
        placed = _share_shards(_fitted(placed, pinned, context))
        return replace(placed, decisions=(*placed.decisions, *kv_copies(placed, context)))


def _fitted(flow: Flow, pinned: dict[str, PlaceRequest], context: PassContext) -> Flow:
    """With the open settings of training chosen by memory, where devices and models are known in bytes."""
    if all(pool.device in ("cpu", "functions") for pool in flow.pools.values()):
        return flow
    from rlflow.cost.errors import CostError
    from rlflow.passes.analysis.costs import Costs
    from rlflow.passes.analysis.fit import check_memory, fit_training

    costs = Costs(flow, context)
    check_memory(flow, costs, context)
    try:
        return fit_training(
            flow, {node_id: pinned.get(node_id) for node_id in flow.nodes}, Costs(flow, context), context
        )
    except CostError:
        return flow  # what cannot be laid out is reported with the memory table


def _share_shards(flow: Flow) -> Flow:
    """With weights that training shards over its replicas (zero = 3) sharded for its pool's other passes too."""
    for trainer in flow.nodes.values():
        here = trainer.placement
        if not isinstance(trainer.op, Train) or here is None or here.layout is None or here.layout.zero < 3:
            continue
        for node in list(flow.nodes.values()):
            there = node.placement
            if (
                node.op.kind in ("train", "generate")
                or there is None
                or there.layout is None
                or there.pool != here.pool
            ):
                continue
            same = (
                reads_model(node.op) == trainer.op.model
                and there.layout.weights == replace(here.layout, zero=0).weights
            )
            if same:
                flow = flow.with_nodes(replace(node, placement=replace(there, layout=replace(there.layout, zero=3))))
    return flow


def _check_training_settings(flow: Flow, context: PassContext) -> None:
    """A setting that would have no effect is an error."""
    for place in context.schedule.places:
        if any(isinstance(flow.nodes[node_id].op, Train) for node_id in place.nodes if node_id in flow.nodes):
            continue
        for setting in ("zero", "recompute", "sp"):
            if getattr(place, setting) is not None:
                context.error(
                    "RLF2006",
                    f"`{setting}` concerns training, and none of the stages placed here trains",
                    place.settings.get(setting, place.span),
                    help=("leave it out, or place a train stage here",),
                )


def _layouts(flow: Flow, pinned: dict[str, PlaceRequest], context: PassContext) -> dict[str, Layout]:
    """The layout of every model stage."""
    requests: dict[tuple[str, str, bool], PlaceRequest] = {}
    for node_id, place in pinned.items():
        node = flow.nodes[node_id]
        model = reads_model(node.op)
        if model is not None:
            requests.setdefault((model, place.pool, isinstance(node.op, Generate)), place)
    layouts: dict[str, Layout] = {}
    reported: set[tuple[str, str]] = set()
    for node in flow.nodes.values():
        model = reads_model(node.op)
        if model is None:
            continue
        assert node.placement is not None
        pool = flow.pools[node.placement.pool]
        sampling = isinstance(node.op, Generate)  # what computes on whole sequences is laid out as training is
        request = pinned.get(node.id) or requests.get((model, pool.name, sampling))
        request = request or requests.get((model, pool.name, not sampling))
        home = Home(
            pool.name,
            len(pool.host_of_rank),
            model,
            context.shapes.get(model),
            training=isinstance(node.op, Train),
            accelerator=pool.device != "cpu",
        )
        layouts[node.id], violations = layout_of(request, home)
        for violation in violations:
            key = (violation.message, str(violation.span))
            if key not in reported:
                reported.add(key)
                context.error("RLF2001", violation.message, violation.span, help=violation.help)
    return layouts
