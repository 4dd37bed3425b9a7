"""The order of the nodes of every phase at once, in time that grows with the flow and not with its phases."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlflow.ir.flow import Flow


def phase_orders(flow: Flow) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The orders by phase, and by phase the nodes that have none because they wait for each other.

    An order is the ids of the phase's nodes along data and order edges without tokens. Among nodes that could come
    next, the first in the order of declaration does (Kahn 1962). A phase is in one of the maps when it has nodes.
    Edges whose ends are in different phases or unknown do not count.
    """
    position = {node_id: index for index, node_id in enumerate(flow.nodes)}
    ids = list(flow.nodes)
    waiting = dict.fromkeys(ids, 0)
    readers: dict[str, list[str]] = {}
    for edge in flow.edges:
        if edge.tokens == 0 and edge.kind != "weights" and edge.src in position and edge.dst in position:
            if flow.nodes[edge.src].phase == flow.nodes[edge.dst].phase:
                waiting[edge.dst] += 1
                readers.setdefault(edge.src, []).append(edge.dst)
    members: dict[str, list[str]] = {}
    for node in flow.nodes.values():
        members.setdefault(node.phase, []).append(node.id)
    orders: dict[str, list[str]] = {}
    stuck: dict[str, list[str]] = {}
    for phase, group in members.items():
        order = _order(group, waiting, readers, position, ids)
        if len(order) == len(group):
            orders[phase] = order
        else:
            stuck[phase] = sorted(set(group) - set(order))
    return orders, stuck


def _order(
    group: list[str],
    waiting: dict[str, int],
    readers: Mapping[str, list[str]],
    position: Mapping[str, int],
    ids: list[str],
) -> list[str]:
    """The order of a group as far as it goes."""
    ready = [position[node_id] for node_id in group if waiting[node_id] == 0]
    heapify(ready)
    order: list[str] = []
    while ready:
        node_id = ids[heappop(ready)]
        order.append(node_id)
        for reader in readers.get(node_id, ()):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heappush(ready, position[reader])
    return order
