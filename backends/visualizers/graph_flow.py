"""The picture of a flow at a stage of its compilation: what the user wrote, where it was placed, what was put in.

A plan, the last stage, has a picture of its own (`graph_model`), which also shows the instructions of the pools.
"""

from __future__ import annotations

from typing import Literal

from rlflow.backends.visualizers.graph_parts import (
    Box,
    Collector,
    Picture,
    evaluation_title,
    group_of,
    short_type,
)
from rlflow.backends.visualizers.palette import stroke
from rlflow.backends.visualizers.words import describe_layout, describe_op, describe_ranks, model_of
from rlflow.diagnostics import Span
from rlflow.ir.decisions import QueueSpec, Reshard
from rlflow.ir.flow import STEP, EdgeKind, Flow, Node
from rlflow.ir.ops import Train


def flow_picture(flow: Flow) -> Picture:
    """The picture of a sound flow of any stage; sorted, so that equal flows give equal pictures."""
    builder = _FlowBuilder(flow)
    builder.declarations()
    builder.nodes()
    builder.data_edges()
    builder.weights()
    return builder.finish()


class _FlowBuilder:
    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.out = Collector()

    def declarations(self) -> None:
        flow, out = self.flow, self.out
        for data in flow.data.values():
            out.data(data.name, data.source, _where(data.span))
        for model in flow.models.values():
            out.model(model.name, model.source, model.trainable, _where(model.span))
        for reward in flow.rewards.values():
            out.reward(reward.name, reward.source, _where(reward.span))
        for environment in flow.environments.values():
            out.environment(environment.name, environment.source, _where(environment.span))

    def nodes(self) -> None:
        for node in self.flow.nodes.values():
            words = [node.id, describe_op(node.op)]
            placement = node.placement
            if placement is not None and placement.layout is not None:
                words.append(describe_layout(placement.layout))
            if placement is not None and node.phase != STEP:
                words.append(f"on {placement.pool}")
            by = node.inserted_by
            tooltip = f"{_where(node.span)}{f'  + {by}' if by else ''}; gives {node.type}"
            box = Box(f"stage.{node.id}", "stage", tuple(words), stroke(node.op.kind), tooltip, by)
            self.out.box(box)
            if placement is not None or node.phase != STEP:
                self.out.member(group_of(node.phase, placement.pool if placement is not None else ""), box.id)
            self.out.uses(box.id, node.op)

    def data_edges(self) -> None:
        queues: dict[tuple[str, str], str] = {}
        for queue in self.flow.decided(QueueSpec):
            box = self.out.queue(
                queue.id, queue.capacity, queue.partitions, queue.reads, _where(queue.span), "insert-queues"
            )
            queues[queue.stage, queue.target] = box
            self.out.arrow(f"stage.{queue.stage}", box, "data", short_type(str(self.flow.nodes[queue.stage].type)))
        for edge in self.flow.edges:
            if edge.kind is EdgeKind.WEIGHTS:
                continue
            target = self.flow.nodes[edge.dst]
            if edge.kind is EdgeKind.ORDER:
                self.out.arrow(f"stage.{edge.src}", f"stage.{edge.dst}", "order", "then", back=edge.tokens > 0)
                continue
            rows = str(self.flow.nodes[edge.src].type)
            source = f"stage.{edge.src}"
            if target.placement is not None:
                source = queues.get((edge.src, target.placement.pool), source)
            label = f"{edge.port}: {short_type(rows)}"
            self.out.arrow(source, f"stage.{edge.dst}", "data", label, f"{edge.port}: {rows}")

    def weights(self) -> None:
        stale = {e.dst: e.tokens - 1 for e in self.flow.edges if e.kind is EdgeKind.WEIGHTS}
        resharded: dict[str, str] = {}
        for reshard in self.flow.decided(Reshard):
            box_id = f"reshard.{reshard.id}"
            self.out.reshard(box_id, reshard.model, reshard, _where(reshard.span), "insert-reshards")
            self.out.member(f"pool.{reshard.target}", box_id)
            steps = max((stale.get(reader, 0) for reader in reshard.readers), default=0)
            self.out.arrow(f"model.{reshard.model}", box_id, "weights", f"staleness <= {steps}")
            resharded |= dict.fromkeys(reshard.readers, box_id)
        for node in self.flow.nodes.values():
            model = model_of(node.op)
            if model is None:
                continue
            box_id = f"stage.{node.id}"
            if node.id in resharded:
                self.out.arrow(resharded[node.id], box_id, "weights", "", f"weights of {model}, resharded")
            else:
                self.out.arrow(f"model.{model}", box_id, "weights", self._label(node, stale), f"weights of {model}")
            if isinstance(node.op, Train):
                tip = f"{node.id} raises the version of {model} by one"
                self.out.arrow(box_id, f"model.{model}", "weights", "version +1", tip, back=True)

    def _label(self, node: Node, stale: dict[str, int]) -> str:
        return f"staleness <= {stale[node.id]}" if node.id in stale else "weights"

    def finish(self) -> Picture:
        flow = self.flow
        groups: list[tuple[str, str, Literal["pool", "evaluation"]]] = [
            (f"pool.{pool.name}", f"pool {pool.name}: {describe_ranks(pool.device, pool.host_of_rank)}", "pool")
            for pool in sorted(flow.pools.values(), key=lambda pool: pool.name)
        ]
        groups += [
            (f"evaluation.{e.name}", evaluation_title(e.name, e.every), "evaluation")
            for e in sorted(flow.evaluations, key=lambda e: e.name)
        ]
        return self.out.picture(f"flow {flow.name}, {flow.stage.name.lower()}", groups)


def _where(span: Span | None) -> str:
    return "" if span is None else str(span)
