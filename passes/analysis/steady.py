"""The token graph of a scheduled flow: what its steady state is worked out from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlflow.ir.decisions import Estimate, QueueSpec, Reshard, Swap
from rlflow.ir.flow import STEP, EdgeKind, Flow, Node, PoolSpec
from rlflow.ir.ops import Score
from rlflow.passes.analysis.homes import homes_of
from rlflow.passes.analysis.tokens.graph import TokenEdge, TokenEdgeKind, TokenGraph, TokenStage, credit_of


def token_graph(flow: Flow, microseconds: dict[str, int] | None = None) -> TokenGraph:
    """Stages of the step with their seconds, a stage `reshard MODEL` for every model that is resharded, and a stage
    `copies before STAGE` where a pool waits for copies from or to the host.

    Edges: data and order edges without tokens; weight edges with theirs; for every queue a credit edge with its
    capacity; for every pool the order in which it runs its stages, one token. Python functions run beside the pool that
    calls them. `microseconds` replaces the estimates; a stage without either takes no time.
    """
    times = {estimate.stage: estimate.us for estimate in flow.decided(Estimate)}
    copies = _copies(flow)
    for name, us in copies.items():
        if not name.startswith(_COPIES):
            times[name] = times.get(name, 0) + us
    times |= microseconds or {}
    nodes = sorted(flow.phase_nodes(STEP), key=lambda node: node.slot or 0)
    homes = homes_of(flow)
    syncs = _syncs(flow)
    orders = _orders(flow, nodes, homes, syncs, copies)
    stages = [TokenStage(node.id, times.get(node.id, 0) / 1e6, tag=node.span) for node in nodes]
    for name, reshard in {sync_name(reshard): reshard for reshard in syncs.values()}.items():
        stages.append(TokenStage(name, (times.get(name, 0) + reshard.us) / 1e6, tag=reshard.span))
    listed = [name for order in orders.values() for name in order if name.startswith(_COPIES)]
    stages += [TokenStage(name, copies[name] / 1e6) for name in listed]
    edges = [
        *_flow_edges(flow, syncs),
        *_room(flow, nodes, homes),
        *_waits(flow, nodes, homes, orders),
        *_order_edges(flow, nodes, homes, orders),
    ]
    return TokenGraph(tuple(stages), tuple(edges))


def without_idle(graph: TokenGraph) -> TokenGraph:
    """The graph without the stages that take no time, where leaving one out does not add edges.

    An edge into such a stage and one out of it become one with the tokens of both: every cycle keeps its seconds and
    its tokens, so that the period is the same. Only for a live graph: a cycle of such stages alone would be lost.
    """
    into: dict[str, list[TokenEdge]] = {stage.name: [] for stage in graph.stages}
    out: dict[str, list[TokenEdge]] = {stage.name: [] for stage in graph.stages}
    for edge in graph.edges:
        into[edge.dst].append(edge)
        out[edge.src].append(edge)
    gone: set[str] = set()
    for stage in graph.stages:
        here, there = into[stage.name], out[stage.name]
        own = [edge for edge in here if edge.src == stage.name]
        if stage.exact or own or len(here) * len(there) > len(here) + len(there):
            continue
        gone.add(stage.name)
        for first in here:
            out[first.src] = [edge for edge in out[first.src] if edge is not first]
        for second in there:
            into[second.dst] = [edge for edge in into[second.dst] if edge is not second]
        for first in here:
            for second in there:
                kept = first if first.kind is not TokenEdgeKind.DATA else second
                joined = replace(kept, src=first.src, dst=second.dst, tokens=first.tokens + second.tokens)
                if first.src != second.dst or not joined.tokens:
                    out[first.src].append(joined)
                    into[second.dst].append(joined)
    stages = tuple(stage for stage in graph.stages if stage.name not in gone)
    return TokenGraph(stages, tuple(edge for stage in stages for edge in out[stage.name]))


def sync_name(reshard: Reshard) -> str:
    """The stage that lays out a model's weights for its readers on a pool."""
    return f"reshard {reshard.id}" + (f" on {reshard.target}" if reshard.source != reshard.target else "")


_COPIES = "copies before "


def _copies(flow: Flow) -> dict[str, int]:
    """Microseconds for which a pool waits for copies, by stage.

    In front of a stage or of a reshard they are a stage of their own, which needs no weights; in front of sending they
    are part of the training, whose weights count as published afterwards.
    """
    names: dict[tuple[str, str], str] = {}
    for reshard in flow.decided(Reshard):
        names[reshard.target, f"reshard {reshard.id}"] = _COPIES + sync_name(reshard)
        names[reshard.source, f"publish {reshard.model}"] = reshard.trainer
    found: dict[str, int] = {}
    for swap in flow.decided(Swap):
        if swap.exposed_us:
            name = names.get((swap.pool, swap.before), _COPIES + swap.before)
            found[name] = found.get(name, 0) + swap.exposed_us
    return found


def _syncs(flow: Flow) -> dict[str, Reshard]:
    """Reader to the reshard that brings its weights."""
    return {reader: reshard for reshard in flow.decided(Reshard) for reader in reshard.readers if reader in flow.nodes}


def _flow_edges(flow: Flow, syncs: dict[str, Reshard]) -> Iterator[TokenEdge]:
    seen: set[tuple[str, str]] = set()
    for edge in flow.edges:
        src, dst = flow.nodes[edge.src], flow.nodes[edge.dst]
        if src.phase != STEP or dst.phase != STEP:
            continue
        if edge.kind is EdgeKind.DATA:
            yield TokenEdge(edge.src, edge.dst, edge.tokens, edge.port, tag=edge.span or dst.span)
        elif edge.kind is EdgeKind.ORDER:
            yield TokenEdge(edge.src, edge.dst, edge.tokens, "order", kind=TokenEdgeKind.ORDER, tag=edge.span)
        else:
            reshard = syncs.get(edge.dst)
            if reshard is None:
                yield TokenEdge(edge.src, edge.dst, edge.tokens, "weights", kind=TokenEdgeKind.WEIGHTS, tag=edge.span)
                continue
            name = sync_name(reshard)
            if (edge.src, name) not in seen:
                seen.add((edge.src, name))
                yield TokenEdge(edge.src, name, edge.tokens, "weights", kind=TokenEdgeKind.WEIGHTS, tag=edge.span)
            yield TokenEdge(name, edge.dst, 0, "weights", kind=TokenEdgeKind.WEIGHTS, tag=edge.span)


def _room(flow: Flow, nodes: list[Node], homes: dict[str, str]) -> Iterator[TokenEdge]:
    """The free places of every queue: taken when its stage starts, freed when the last reader on the target ends."""
    slots = {node.id: node.slot or 0 for node in nodes}
    for queue in flow.decided(QueueSpec):
        if queue.stage not in slots:
            continue
        readers = [
            edge.dst
            for edge in flow.edges
            if edge.kind is EdgeKind.DATA and edge.src == queue.stage and homes[edge.dst] == queue.target
        ]
        if readers:
            last = max(readers, key=lambda reader: slots.get(reader, 0))
            yield credit_of(TokenEdge(queue.stage, last, 0, queue.id, tag=queue.span), queue.capacity)


def _orders(
    flow: Flow, nodes: list[Node], homes: dict[str, str], syncs: dict[str, Reshard], copies: dict[str, int]
) -> dict[str, list[str]]:
    """Pool to what it does in a step, one after the other. Python functions run beside it."""
    found: dict[str, list[str]] = {}
    for pool in flow.pools.values():
        order: list[str] = []
        for node in nodes:
            if homes[node.id] != pool.name or isinstance(node.op, Score):
                continue
            reshard = syncs.get(node.id)
            names = [node.id] if reshard is None else [sync_name(reshard), node.id]
            order += [
                part
                for name in names
                if name not in order
                for part in (_COPIES + name, name)
                if part == name or part in copies
            ]
        found[pool.name] = order
    return found


def _waits(flow: Flow, nodes: list[Node], homes: dict[str, str], orders: dict[str, list[str]]) -> Iterator[TokenEdge]:
    """A pool takes what a stage reads from elsewhere before it receives weights or waits for copies for that stage."""
    own = {node.id for node in nodes if not isinstance(node.op, Score)}
    heads: dict[str, str] = {}
    for order in orders.values():
        head = ""
        for name in order:
            head = head or name
            if name in own:
                heads[name], head = head, ""
    for edge in flow.edges:
        if edge.kind is not EdgeKind.DATA or heads.get(edge.dst, edge.dst) == edge.dst:
            continue
        if edge.src not in own or homes[edge.src] != homes[edge.dst]:
            yield TokenEdge(edge.src, heads[edge.dst], edge.tokens, "order", kind=TokenEdgeKind.ORDER, tag=edge.span)


def _order_edges(
    flow: Flow, nodes: list[Node], homes: dict[str, str], orders: dict[str, list[str]]
) -> Iterator[TokenEdge]:
    for pool in flow.pools.values():
        order = orders[pool.name]
        yield from _collections(flow, nodes, homes, pool, order)
        for place, name in enumerate(order):
            last = place == len(order) - 1
            label = f"order of pool {pool.name}"
            yield TokenEdge(
                name, order[(place + 1) % len(order)], int(last), label, kind=TokenEdgeKind.ORDER, tag=pool.span
            )


def _collections(
    flow: Flow, nodes: list[Node], homes: dict[str, str], pool: PoolSpec, order: list[str]
) -> Iterator[TokenEdge]:
    """Where a pool collects the results of its Python functions: before the first of its stages that reads one, or at
    the end of the step. Other pools get it then, and what follows in the pool waits for it."""
    for node in nodes:
        if homes[node.id] != pool.name or not isinstance(node.op, Score) or not order:
            continue
        readers = [edge.dst for edge in flow.edges if edge.kind is EdgeKind.DATA and edge.src == node.id]
        local = [order.index(reader) for reader in readers if reader in order]
        if not local:
            yield TokenEdge(node.id, order[0], 1, "order", kind=TokenEdgeKind.ORDER, tag=pool.span)
        before = order[min(local, default=len(order)) - 1]
        for reader in readers:
            if homes[reader] != pool.name and min(local, default=1):
                yield TokenEdge(before, reader, 0, "order", kind=TokenEdgeKind.ORDER, tag=pool.span)
