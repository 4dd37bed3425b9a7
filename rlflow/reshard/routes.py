"""Routes: the way of every class from its sources to the devices that miss it, and the load on every link.

Multicast: one copy enters every node, nodes pass it on in a chain, and so do the devices of a node. The order of nodes
and devices turns from share to share, so that the ends of chains, which pass nothing on, are spread. Unicast:
the source sends to every device itself. A device in a node that holds the class is served from within that node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

from rlflow.reshard.atoms import AtomClass
from rlflow.reshard.endpoint import Fabric
from rlflow.reshard.need import missing
from rlflow.reshard.shares import Share
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Delivery:
    """One class to devices by node, from any of `sources`. Every source is in the node, or none is."""

    number: int
    """Of the class."""
    sources: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    remote: bool
    """Whether it enters the nodes from outside."""
    turn: int
    """Where the turning of its chains starts, loads being equal."""

    @property
    def receivers(self) -> int:
        return sum(map(len, self.nodes))


@dataclass(frozen=True, slots=True)
class Route:
    delivery: Delivery
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Hop:
    """`step` 0 leaves the source; step n passes on what arrived at step n - 1."""

    source: int
    target: int
    step: int


def deliveries(classes: tuple[AtomClass, ...], fabric: Fabric) -> list[Delivery]:
    """Within each node that holds a class to the others there; and to all nodes that do not, together."""
    found: list[Delivery] = []
    for number, atoms in enumerate(classes):
        absent: dict[int, list[int]] = {}
        for device in missing(atoms):
            absent.setdefault(fabric.node_of[device], []).append(device)
        if not absent:
            continue
        holders: dict[int, list[int]] = {}
        for device in atoms.holders:
            holders.setdefault(fabric.node_of[device], []).append(device)
        for node in sorted(absent.keys() & holders.keys()):
            found.append(Delivery(number, tuple(holders[node]), (tuple(absent[node]),), False, len(found)))
        far = sorted(absent.keys() - holders.keys())
        if far:
            groups = tuple(tuple(absent[node]) for node in far)
            found.append(Delivery(number, atoms.holders, groups, True, len(found)))
    return found


def hops(delivery: Delivery, share: Share, *, multicast: bool) -> Iterator[Hop]:
    """Of one share, in an order in which everything is there before it is passed on."""
    if not multicast:
        yield from (Hop(share.source, device, 0) for node in delivery.nodes for device in node)
        return
    before, step = share.source, 0
    for node in _rotated(delivery, share):
        for index, device in enumerate(node):
            yield Hop(before if index == 0 else node[index - 1], device, step + index)
        before, step = node[0], step + 1


def node_hops(
    delivery: Delivery, share: Share, fabric: Fabric, *, multicast: bool
) -> Iterator[tuple[tuple[int, int], int]]:
    """The hops of a share, counted by their nodes: a chain enters a node once and goes on inside it."""
    node_of = fabric.node_of
    before = node_of[share.source]
    for node in _rotated(delivery, share):
        home = node_of[node[0]]
        if not multicast:
            yield (before, home), len(node)
            continue
        yield (before, home), 1
        if len(node) > 1:
            yield (home, home), len(node) - 1
        before = home


def _rotated(delivery: Delivery, share: Share) -> Iterator[tuple[int, ...]]:
    count = len(delivery.nodes)
    for index in range(count):
        node = delivery.nodes[(share.node_turn + index) % count]
        first = share.device_turn % len(node)
        yield node[first:] + node[:first]


FEW_RECEIVERS = 64
"""Above, chains are many and their turns even out without being chosen."""


@dataclass(slots=True)
class Loads:
    """Elements over every link: out of and into devices, out of and into nodes."""

    fabric: Fabric
    device_out: dict[int, int] = field(default_factory=dict)
    device_in: dict[int, int] = field(default_factory=dict)
    node_out: dict[int, int] = field(default_factory=dict)
    node_in: dict[int, int] = field(default_factory=dict)

    def add_receivers(self, delivery: Delivery, elements: int, *, multicast: bool) -> None:
        """What a delivery brings, whichever way: all of it to every receiver. Afterwards add its shares."""
        into, out, node_in = self.device_in, self.device_out, self.node_in
        for node in delivery.nodes:
            for device in node:
                into[device] = into.get(device, 0) + elements
            if delivery.remote:
                home = self.fabric.node_of[node[0]]
                node_in[home] = node_in.get(home, 0) + (elements if multicast else elements * len(node))
            if multicast:  # everyone in the node's chain passes it on; its end is corrected for every share
                for device in node:
                    out[device] = out.get(device, 0) + elements

    def add_share(self, delivery: Delivery, share: Share, elements: int, *, multicast: bool) -> None:
        """What the source of a share sends, and the ends of the chains."""
        node_of, out, node_out = self.fabric.node_of, self.device_out, self.node_out
        if not multicast:
            _add(out, share.source, elements * delivery.receivers)
            if delivery.remote:
                _add(node_out, node_of[share.source], elements * delivery.receivers)
            return
        before, count = share.source, len(delivery.nodes)
        for index in range(count):
            node = delivery.nodes[(share.node_turn + index) % count]
            first = share.device_turn % len(node)
            out[before] = out.get(before, 0) + elements
            out[node[first - 1]] -= elements  # the last of a node's chain passes nothing on inside it
            if delivery.remote:
                home = node_of[before]
                node_out[home] = node_out.get(home, 0) + elements
            before = node[first]

    def turned(self, delivery: Delivery, share: Share, position: int) -> Share:
        """The share with its chain turned so that it ends where most is sent already: the end passes nothing on."""
        base, node_of = delivery.turn + position, self.fabric.node_of
        node_turn = share.node_turn
        if len(delivery.nodes) > 1:
            out = self.node_out
            node_turn = _last_of_most([out.get(node_of[node[0]], 0) for node in delivery.nodes], base) + 1
            device_turn = self._leaders(delivery, base)
        else:
            out = self.device_out
            device_turn = _last_of_most([out.get(device, 0) for device in delivery.nodes[0]], base) + 1
        return Share(share.source, share.low, share.high, node_turn, device_turn)

    def _leaders(self, delivery: Delivery, base: int) -> int:
        """The device turn under which the nodes' first devices, which send twice, have sent least against the last."""
        if delivery.receivers > FEW_RECEIVERS:
            return base
        out = self.device_out

        def lead(turn: int) -> int:
            return sum(out.get(n[turn % len(n)], 0) - out.get(n[(turn - 1) % len(n)], 0) for n in delivery.nodes)

        return min(range(base, base + max(map(len, delivery.nodes))), key=lead)

    def seconds(self, element_bytes: int) -> float:
        """Of the busiest link."""
        device, node = self.fabric.device_bandwidth, self.fabric.node_bandwidth
        times = [n / device[d] for loads in (self.device_out, self.device_in) for d, n in loads.items()]
        times += [n / node[d] for loads in (self.node_out, self.node_in) for d, n in loads.items()]
        return max(times, default=0.0) * element_bytes


def _last_of_most(loads: list[int], base: int) -> int:
    """Index of the largest; of equal ones the first from `base` on, cyclically."""
    most, start = max(loads), base % len(loads)
    return loads.index(most, start) if most in loads[start:] else loads.index(most)


def _add(loads: dict[int, int], key: int, by: int) -> None:
    loads[key] = loads.get(key, 0) + by
