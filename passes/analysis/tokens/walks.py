"""Walks in directed graphs whose nodes are numbers: strongly connected components, shortest cycles, distances."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class Arc(NamedTuple):
    """From node to node; `edge` is the number of the edge that it stands for."""

    src: int
    dst: int
    edge: int


def leaving(nodes: int, arcs: Sequence[Arc]) -> list[list[Arc]]:
    out: list[list[Arc]] = [[] for _ in range(nodes)]
    for arc in arcs:
        out[arc.src].append(arc)
    return out


def components(nodes: int, arcs: Sequence[Arc]) -> list[list[int]]:
    """Strongly connected components, each sorted, in topological order: what comes first never depends on later ones.

    Tarjan 1972, with a stack of its own instead of recursion.
    """
    out = leaving(nodes, arcs)
    order, low = [-1] * nodes, [0] * nodes
    open_nodes: list[int] = []
    is_open = [False] * nodes
    found: list[list[int]] = []
    counter = 0
    for root in range(nodes):
        if order[root] >= 0:
            continue
        calls = [(root, 0)]
        while calls:
            node, at = calls.pop()
            if at == 0:
                order[node] = low[node] = counter
                counter += 1
                open_nodes.append(node)
                is_open[node] = True
            if at < len(out[node]):
                calls.append((node, at + 1))
                other = out[node][at].dst
                if order[other] < 0:
                    calls.append((other, 0))
                elif is_open[other]:
                    low[node] = min(low[node], order[other])
                continue
            if low[node] == order[node]:
                part = []
                while True:
                    member = open_nodes.pop()
                    is_open[member] = False
                    part.append(member)
                    if member == node:
                        break
                found.append(sorted(part))
            if calls:
                above = calls[-1][0]
                low[above] = min(low[above], low[node])
    return found[::-1]


def shortest_cycle(nodes: int, arcs: Sequence[Arc]) -> list[Arc] | None:
    """A cycle of fewest arcs, from the lowest node that lies on one so short; None where there is no cycle."""
    part = [0] * nodes
    sizes = []
    for number, members in enumerate(components(nodes, arcs)):
        sizes.append(len(members))
        for member in members:
            part[member] = number
    inner = leaving(nodes, [arc for arc in arcs if part[arc.src] == part[arc.dst]])
    best: list[Arc] | None = None
    for root in range(nodes):
        if inner[root] and (best is None or len(best) > 1):
            shorter = _cycle_through(root, inner, len(best) if best else sizes[part[root]] + 1)
            best = shorter or best
    return best


def _cycle_through(root: int, out: Sequence[Sequence[Arc]], below: int) -> list[Arc] | None:
    """A shortest cycle through `root` with fewer than `below` arcs."""
    into: dict[int, Arc] = {}
    depth = {root: 0}
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        if depth[node] + 1 >= below:
            return None
        for arc in out[node]:
            if arc.dst == root:
                cycle = [arc]
                while cycle[-1].src != root:
                    cycle.append(into[cycle[-1].src])
                return cycle[::-1]
            if arc.dst not in depth:
                depth[arc.dst] = depth[node] + 1
                into[arc.dst] = arc
                waiting.append(arc.dst)
    return None


def distances(root: int, out: Sequence[Sequence[Arc]], lengths: Sequence[int]) -> dict[int, int]:
    """The shortest lengths from `root` to every node that it reaches; lengths by edge, none negative (Dijkstra
    1959)."""
    found: dict[int, int] = {}
    heap = [(0, root)]
    while heap:
        length, node = heappop(heap)
        if node in found:
            continue
        found[node] = length
        for arc in out[node]:
            if arc.dst not in found:
                heappush(heap, (length + lengths[arc.edge], arc.dst))
    return found
