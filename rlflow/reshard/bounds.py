"""Lower bounds on the bytes and the time of a reshard, whatever the plan.

Receive: a device must get at least what it needs and does not have. Node: what the devices of a node need and none of
them has must enter it, once. Source: what only a group of devices has, and somebody else needs, must leave the group
at least once; multicast may do the rest. The largest of the three, over bandwidths, bounds the time. For a single class
and a chain the bound is approached as the number of chunks grows; for mixed classes it is a bound only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlflow.reshard.atoms import AtomClass
from rlflow.reshard.endpoint import Fabric
from rlflow.reshard.need import missing
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes on the wire, and seconds over the links of a fabric."""

    received_bytes: int
    """Sum over devices of Need without Have."""
    largest_receiver_bytes: int
    receive_seconds: float
    node_seconds: float
    source_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.receive_seconds, self.node_seconds, self.source_seconds)

    @property
    def tightest(self) -> str:
        """`receive`, `node` or `source`: the bound that decides; the first of equal ones."""
        return max(("receive", "node", "source"), key=lambda name: float(getattr(self, f"{name}_seconds")))


def lower_bounds(classes: Iterable[AtomClass], fabric: Fabric, element_bytes: int) -> Bounds:
    """`classes` are of devices; `element_bytes` of an element on the wire."""
    receive: dict[int, int] = {}
    enter: dict[int, int] = {}
    leave = _Leaving(dict(enumerate(fabric.device_bandwidth)))
    leave_nodes = _Leaving(fabric.node_bandwidth)
    for found in classes:
        absent = missing(found)
        if not absent:
            continue
        size = found.elements * element_bytes
        for device in absent:
            receive[device] = receive.get(device, 0) + size
        held_in = {fabric.node_of[device] for device in found.holders}
        entered = sorted({fabric.node_of[device] for device in absent} - held_in)
        for node in entered:
            enter[node] = enter.get(node, 0) + size
        leave.add(found.holders, absent, size)
        if entered:
            leave_nodes.add(tuple(sorted(held_in)), tuple(entered), size)
    return Bounds(
        received_bytes=sum(receive.values()),
        largest_receiver_bytes=max(receive.values(), default=0),
        receive_seconds=max((size / fabric.device_bandwidth[d] for d, size in receive.items()), default=0.0),
        node_seconds=max((size / fabric.node_bandwidth[n] for n, size in enter.items()), default=0.0),
        source_seconds=max(leave.seconds(), leave_nodes.seconds()),
    )


SUBSETS_UP_TO = 128
"""Distinct groups of holders up to which every group is charged with all that is held inside it; above, with what it
holds itself and with what its connected component holds. Either way the bound is valid, only less sharp."""


class _Leaving:
    """Bytes that must leave groups of members (devices, or nodes). There are too many groups to try all."""

    def __init__(self, bandwidth: Mapping[int, float]) -> None:
        self.bandwidth = bandwidth
        self.flows: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
        """Bytes by holders, then by the members that need them and are no holders."""

    def add(self, holders: tuple[int, ...], absent: tuple[int, ...], size: int) -> None:
        flows = self.flows.setdefault(holders, {})
        flows[absent] = flows.get(absent, 0) + size

    def seconds(self) -> float:
        groups = list(self.flows)
        best = max((self._through(group, [group]) for group in groups), default=0.0)
        if len(groups) <= SUBSETS_UP_TO:
            for group in groups:
                members = frozenset(group)
                best = max(best, self._through(group, [inner for inner in groups if members.issuperset(inner)]))
        for members_of, inside in _components(groups):
            best = max(best, self._through(members_of, inside))
        return best

    def _through(self, group: tuple[int, ...], inside: list[tuple[int, ...]]) -> float:
        """Seconds for what groups inside `group` hold and somebody outside it needs."""
        members = frozenset(group)
        size = sum(
            count
            for inner in inside
            for absent, count in self.flows[inner].items()
            if inner == group or not members.issuperset(absent)
        )
        return size / sum(self.bandwidth[member] for member in group)


def _components(groups: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
    """Groups that share members, together: (all their members, the groups)."""
    parent: dict[int, int] = {}

    def root(member: int) -> int:
        while parent.setdefault(member, member) != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    for group in groups:
        for member in group:
            parent[root(member)] = root(group[0])
    members: dict[int, list[int]] = {}
    for member in sorted(parent):
        members.setdefault(root(member), []).append(member)
    inside: dict[int, list[tuple[int, ...]]] = {}
    for group in groups:
        inside.setdefault(root(group[0]), []).append(group)
    return [(tuple(members[key]), found) for key, found in inside.items()]
