"""The rules of every stage as one table, checked after every pass. A broken rule is a bug of ours, not of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlflow.ir.flow import STEP, EdgeKind, Flow, Stage, reads_model
from rlflow.ir.ops import FrozenModel, Score, Take, Train
from rlflow.ir.order import phase_orders
from rlflow.ir.typesystem import RowsType, WeightsType

Rule = Callable[[Flow], Iterator[str]]


def _edges_end_at_nodes(flow: Flow) -> Iterator[str]:
    for edge in flow.edges:
        for end in (edge.src, edge.dst):
            if end not in flow.nodes:
                yield f"edge {edge.src} -> {edge.dst} names the unknown node {end}"


def _names_resolve(flow: Flow) -> Iterator[str]:
    for node in flow.nodes.values():
        model = reads_model(node.op)
        if model is not None and model not in flow.models:
            yield f"{node.id} reads the unknown model {model}"
        if isinstance(node.op, Take) and node.op.data not in flow.data:
            yield f"{node.id} takes from the unknown data {node.op.data}"
        if isinstance(node.op, Score) and node.op.reward not in flow.rewards:
            yield f"{node.id} calls the unknown reward {node.op.reward}"
    for declared in flow.models.values():
        if isinstance(declared.source, FrozenModel) and declared.source.of not in flow.models:
            yield f"model {declared.name} is frozen from the unknown model {declared.source.of}"


def _ports_are_single(flow: Flow) -> Iterator[str]:
    seen: set[tuple[str, str]] = set()
    for edge in flow.edges:
        if edge.kind is EdgeKind.DATA:
            if (edge.dst, edge.port) in seen:
                yield f"port {edge.port} of {edge.dst} has two producers"
            seen.add((edge.dst, edge.port))


def _phases_are_acyclic(flow: Flow) -> Iterator[str]:
    _, stuck = phase_orders(flow)
    for phase in (STEP, *(e.name for e in flow.evaluations)):
        if phase in stuck:
            yield f"phase {phase}: cycle through {', '.join(stuck[phase])}"


def _types_fit_ops(flow: Flow) -> Iterator[str]:
    for node in flow.nodes.values():
        wanted = WeightsType if isinstance(node.op, Train) else RowsType
        if not isinstance(node.type, wanted):
            yield f"{node.id}: {node.op.kind} gives {wanted.__name__}, not {node.type}"


def _evaluations_do_not_train(flow: Flow) -> Iterator[str]:
    for node in flow.nodes.values():
        if isinstance(node.op, Train) and node.phase != STEP:
            yield f"{node.id} trains inside the evaluation {node.phase}"


def _everything_is_placed(flow: Flow) -> Iterator[str]:
    for node in flow.nodes.values():
        if node.placement is None:
            yield f"{node.id} has no placement"
        elif node.placement.pool not in flow.pools:
            yield f"{node.id} is placed on the unknown pool {node.placement.pool}"


def _models_have_layouts(flow: Flow) -> Iterator[str]:
    for node in flow.nodes.values():
        if reads_model(node.op) is not None and (node.placement is None or node.placement.layout is None):
            yield f"{node.id} has a model but no layout"


def _layouts_fill_pools(flow: Flow) -> Iterator[str]:
    for node in flow.nodes.values():
        if node.placement is None or node.placement.layout is None or node.placement.pool not in flow.pools:
            continue
        size = len(flow.pools[node.placement.pool].host_of_rank)
        if node.placement.layout.size != size:
            yield f"{node.id}: layout of {node.placement.layout.size} ranks on a pool of {size}"


def _trained_weights_reach_readers(flow: Flow) -> Iterator[str]:
    channels = {(e.src, e.dst) for e in flow.edges if e.kind is EdgeKind.WEIGHTS}
    for trainer in flow.nodes.values():
        if not isinstance(trainer.op, Train):
            continue
        for node in flow.nodes.values():
            if flow.owner_of(reads_model(node.op)) == trainer.op.model and node.id != trainer.id and node.phase == STEP:
                if (trainer.id, node.id) not in channels:
                    yield f"no weights edge from {trainer.id} to {node.id}"


def _weights_edges_carry_tokens(flow: Flow) -> Iterator[str]:
    for edge in flow.edges:
        if edge.kind is EdgeKind.WEIGHTS and edge.tokens < 1:
            yield f"weights edge {edge.src} -> {edge.dst} has no initial token: the first step could never start"


def _slots_follow_edges(flow: Flow) -> Iterator[str]:
    for node in flow.nodes.values():
        if node.slot is None:
            yield f"{node.id} has no slot"
    for edge in flow.edges:
        if edge.kind is EdgeKind.WEIGHTS:
            continue
        src, dst = flow.nodes[edge.src].slot, flow.nodes[edge.dst].slot
        if src is not None and dst is not None and src >= dst:
            yield f"{edge.dst} (slot {dst}) runs before its input {edge.src} (slot {src})"


RULES: dict[Stage, tuple[Rule, ...]] = {
    Stage.LOGICAL: (
        _edges_end_at_nodes,
        _names_resolve,
        _ports_are_single,
        _phases_are_acyclic,
        _types_fit_ops,
        _evaluations_do_not_train,
    ),
    Stage.PLACED: (_everything_is_placed, _layouts_fill_pools),
    Stage.PHYSICAL: (_models_have_layouts, _trained_weights_reach_readers, _weights_edges_carry_tokens),
    Stage.SCHEDULED: (_slots_follow_edges,),
}


def broken_rules(flow: Flow) -> list[str]:
    """Every broken rule of the flow's stage and of the stages before it, in words; empty when the flow is sound."""
    problems: list[str] = []
    for stage in Stage:
        if stage > flow.stage:
            break
        for rule in RULES[stage]:
            problems.extend(rule(flow))
            if problems and rule is _edges_end_at_nodes:
                return problems  # the other rules follow edges
    return problems
