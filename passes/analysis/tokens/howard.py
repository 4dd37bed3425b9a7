"""The largest ratio of cost to tokens over the cycles of a strongly connected graph, exactly.

Howard's policy iteration for cycle ratios (Howard 1960; Cochet-Terrasson, Cohen, Gaubert, McGettrick, Quadrat 1998;
Dasdan 2004 for its speed). All numbers are integers: the ratio is a fraction, and potentials are kept times its
denominator. So ties are ties, and the iteration ends: each round raises the ratio, or keeps it and raises a
potential.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Weighted(NamedTuple):
    """An edge between numbered nodes with an integer cost and a number of tokens."""

    src: int
    dst: int
    cost: int
    tokens: int


class CycleRatio(NamedTuple):
    """cost / tokens of the critical cycle (numbers of edges), and a potential for every node.

    For every edge e: potential[e.src] >= tokens * e.cost - cost * e.tokens + potential[e.dst], with equality on the
    critical cycle.
    """

    cost: int
    tokens: int
    cycle: tuple[int, ...]
    potential: tuple[int, ...]
    rounds: int


def howard(nodes: int, edges: Sequence[Weighted]) -> CycleRatio:
    """For a strongly connected graph with an edge and no cycle without tokens; edges may be parallel."""
    policy = [-1] * nodes
    for number, edge in enumerate(edges):
        best = policy[edge.src]
        if best < 0 or (-edge.cost, edge.tokens) < (-edges[best].cost, edges[best].tokens):
            policy[edge.src] = number
    src, dst = [edge.src for edge in edges], [edge.dst for edge in edges]
    forward, backward = range(len(edges)), range(len(edges) - 1, -1, -1)
    potential = [0] * nodes
    rounds = 0
    while True:
        rounds += 1
        cycle, cost, tokens = _best_cycle(edges, policy, dst)
        reduced = [tokens * its_cost - cost * its_tokens for _, _, its_cost, its_tokens in edges]
        _evaluate(policy, potential, src[cycle[0]], src, dst, reduced)
        order = backward if rounds % 2 else forward
        if not _improve(policy, potential, order, src, dst, reduced):
            return CycleRatio(cost, tokens, tuple(cycle), tuple(potential), rounds)


def _best_cycle(edges: Sequence[Weighted], policy: Sequence[int], dst: Sequence[int]) -> tuple[list[int], int, int]:
    """The cycle of the policy with the largest ratio, the first found where several have it; its cost and tokens."""
    seen = [-1] * len(policy)
    best: list[int] = []
    cost, tokens = 0, 0
    for root in range(len(policy)):
        node = root
        while seen[node] < 0:
            seen[node] = root
            node = dst[policy[node]]
        if seen[node] != root:
            continue
        cycle = [policy[node]]
        while dst[cycle[-1]] != node:
            cycle.append(policy[dst[cycle[-1]]])
        its_cost = sum(edges[number].cost for number in cycle)
        its_tokens = sum(edges[number].tokens for number in cycle)
        if not best or its_cost * tokens > cost * its_tokens:
            best, cost, tokens = cycle, its_cost, its_tokens
    return best, cost, tokens


def _evaluate(
    policy: list[int],
    potential: list[int],
    root: int,
    src: Sequence[int],
    dst: Sequence[int],
    reduced: Sequence[int],
) -> None:
    """Lead every node to `root` on the best cycle and set its potential: the reduced cost of its way there."""
    led: list[list[int]] = [[] for _ in policy]
    for number in policy:
        led[dst[number]].append(number)
    known = [False] * len(policy)
    known[root] = True
    potential[root] = 0
    order = [root]
    for node in order:
        for number in led[node]:
            maker = src[number]
            if not known[maker]:
                known[maker] = True
                potential[maker] = reduced[number] + potential[node]
                order.append(maker)
    if len(order) == len(policy):
        return
    # The others were led to another cycle: they take the shortest way to this one.
    into: list[list[int]] = [[] for _ in policy]
    for number, maker in enumerate(src):
        if not known[maker]:
            into[dst[number]].append(number)
    for node in order:
        for number in into[node]:
            maker = src[number]
            if not known[maker]:
                known[maker] = True
                policy[maker] = number
                potential[maker] = reduced[number] + potential[node]
                order.append(maker)


def _improve(
    policy: list[int],
    potential: list[int],
    order: Sequence[int],
    src: Sequence[int],
    dst: Sequence[int],
    reduced: Sequence[int],
) -> bool:
    """Give every node the edge that promises most, where that is more than its potential; one pass in this order.

    A raised potential counts at once for the edges that follow. As in the relaxations of Bellman 1958 each policy edge
    then promises at least its node's potential, and the last one changed more: a cycle with a changed edge has a larger
    ratio, and no node gets a lower potential.
    """
    changed = False
    for number in order:
        promise = reduced[number] + potential[dst[number]]
        if promise > potential[src[number]]:
            potential[src[number]] = promise
            policy[src[number]] = number
            changed = True
    return changed
