"""The plan of a reshard: which box of which tensor goes from which device to which; how near it is to the bounds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal

from rlflow.reshard.atoms import AtomClass, atom_classes
from rlflow.reshard.bounds import Bounds, lower_bounds
from rlflow.reshard.boxes import Box
from rlflow.reshard.catalogue import Catalogue
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.need import kept, on_devices
from rlflow.reshard.routes import Loads, Route, deliveries, hops, node_hops
from rlflow.reshard.shards import Sharding
from rlflow.reshard.shares import share_cells, share_elements
from rlflow.reshard.sources import choose_sources
from rlflow.values import dataclass

MIN_SPLIT_BYTES = 1 << 20
"""Boxes below this are not shared out between sources: the latency of a message would cost more than it saves."""

GOOD_DISTANCE, GOOD_SECONDS = 0.01, 1e-3
"""A greedy choice of sources within either of these of the bound is taken, without solving for a better one."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """`box` of canonical tensor `tensor`, from device to device; within a device it is a local copy.

    With `step` > 0 the sender passes on what it received in this plan, at step - 1; it has it in its target shard.
    """

    tensor: str
    box: Box
    source: int
    target: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Cast:
    """The element type changes: `at` the sender where the target type is the narrower, else at the receiver."""

    source: str
    target: str
    at: Literal["sender", "receiver"]


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    catalogue: Catalogue
    source: Endpoint
    target: Endpoint
    fabric: Fabric
    multicast: bool
    min_split_bytes: int
    classes: tuple[AtomClass, ...]
    """Of devices."""
    routes: tuple[Route, ...]
    loads: Loads
    bounds: Bounds
    source_choice: str
    """How sources were chosen: `lp`, `greedy`, or `forced`."""

    @property
    def element_bytes(self) -> int:
        """On the wire: the narrower of the two types."""
        return min(self.source.storage.element_bytes, self.target.storage.element_bytes)

    @property
    def cast(self) -> Cast | None:
        before, after = self.source.storage, self.target.storage
        if before.dtype == after.dtype:
            return None
        narrower = after.element_bytes <= before.element_bytes
        return Cast(before.dtype, after.dtype, "sender" if narrower else "receiver")

    # --- volumes -----------------------------------------------------------------------------------------------------

    @property
    def received_bytes(self) -> int:
        return sum(self.loads.device_in.values()) * self.element_bytes

    @property
    def kept_bytes(self) -> int:
        """Needed bytes that are on the device already, in the source's element type."""
        elements = sum(found.elements * len(kept(found)) for found in self.classes)
        return elements * self.source.storage.element_bytes

    @property
    def redundancy(self) -> float:
        """Received bytes over the least possible, minus 1."""
        least = self.bounds.received_bytes
        return self.received_bytes / least - 1 if least else float(self.received_bytes)

    @property
    def seconds(self) -> float:
        """Of the busiest link at full bandwidth; latency, launches and allocation are not in it."""
        return self.loads.seconds(self.element_bytes)

    @property
    def distance(self) -> float:
        """Seconds over the bound, minus 1. The bound of mixed classes need not be attainable."""
        return self.seconds / self.bounds.seconds - 1 if self.bounds.seconds else 0.0

    def link_bytes(self) -> dict[str, dict[int, int]]:
        """`device out`, `device in`, `node out`, `node in`: bytes by device or node; unused links are left out."""
        loads = self.loads
        tables = {
            "device out": loads.device_out,
            "device in": loads.device_in,
            "node out": loads.node_out,
            "node in": loads.node_in,
        }
        return {
            name: {key: count * self.element_bytes for key, count in sorted(table.items()) if count}
            for name, table in tables.items()
        }

    def node_bytes(self) -> dict[tuple[int, int], int]:
        """(from node, to node) of the fabric to the bytes that hop from one to the other; equal nodes: inside it."""
        total: dict[tuple[int, int], int] = {}
        for route in self.routes:
            found = self.classes[route.delivery.number]
            for share in route.shares:
                elements = share_elements(found, share.low, share.high, self.min_elements)
                for key, count in node_hops(route.delivery, share, self.fabric, multicast=self.multicast):
                    total[key] = total.get(key, 0) + count * elements * self.element_bytes
        return {key: total[key] for key in sorted(total) if total[key]}

    # --- the transfer set --------------------------------------------------------------------------------------------

    def copies(self, devices: Collection[int] | None = None) -> Iterator[Transfer]:
        """What devices already hold of their need, every element once; of some devices only, where given."""
        for found in self.classes:
            mine = [d for d in kept(found) if devices is None or d in devices]
            for device in mine:
                for part in found.parts:
                    for name in part.names:
                        for box in part.boxes:
                            yield Transfer(name, box, device, device)

    def transfers(
        self, devices: Collection[int] | None = None, names: Collection[str] | None = None
    ) -> Iterator[Transfer]:
        """Every missing element of every device once. In this order nothing is passed on before it has arrived.

        `devices`: only what these send or receive; `names`: only of these tensors. The set grows with layers x devices;
        ask for what you execute.
        """
        for route in self.routes:
            found = self.classes[route.delivery.number]
            if names is not None and not any(name in names for part in found.parts for name in part.names):
                continue
            for share in route.shares:
                ways = [
                    hop
                    for hop in hops(route.delivery, share, multicast=self.multicast)
                    if devices is None or hop.source in devices or hop.target in devices
                ]
                if ways:
                    for name, box in share_cells(found, share.low, share.high, self.min_elements, names):
                        for hop in ways:
                            yield Transfer(name, box, hop.source, hop.target, hop.step)

    def route_elements(self, number: int, names: Collection[str]) -> dict[tuple[int, int], int]:
        """Elements of some tensors over every pair of devices, of one route; a part has all of its tensors or none."""
        route = self.routes[number]
        found = self.classes[route.delivery.number]
        found = replace(found, parts=tuple(part for part in found.parts if part.names[0] in names))
        total: dict[tuple[int, int], int] = {}
        for share in route.shares:
            elements = share_elements(found, share.low, share.high, self.min_elements)
            for hop in hops(route.delivery, share, multicast=self.multicast):
                total[hop.source, hop.target] = total.get((hop.source, hop.target), 0) + elements
        return total

    @property
    def min_elements(self) -> int:
        return self.min_split_bytes // self.element_bytes


def plan_reshard(
    catalogue: Catalogue,
    source: Endpoint,
    target: Endpoint,
    fabric: Fabric,
    *,
    multicast: bool = True,
    min_split_bytes: int = MIN_SPLIT_BYTES,
) -> ReshardPlan:
    """Plan from one layout to another; their devices may be the same, others, or partly the same.

    Received bytes are the least possible: every missing element is received once. ReshardError for a layout that cannot
    hold the model, a device that the fabric lacks, or a needed tensor that the source lacks.
    """
    fabric.check(source)
    fabric.check(target)
    ranks = atom_classes(
        Sharding(catalogue, source.layout, source.storage), Sharding(catalogue, target.layout, target.storage)
    )
    classes = on_devices(ranks, source.devices, target.devices)
    wire = min(source.storage.element_bytes, target.storage.element_bytes)
    bounds = lower_bounds(classes, fabric, wire)
    routes, loads, method = choose_sources(
        classes,
        deliveries(classes, fabric),
        fabric,
        multicast=multicast,
        min_elements=min_split_bytes // wire,
        good_enough=max(bounds.seconds * (1 + GOOD_DISTANCE), bounds.seconds + GOOD_SECONDS) / wire,
    )
    return ReshardPlan(
        catalogue, source, target, fabric, multicast, min_split_bytes, classes, tuple(routes), loads, bounds, method
    )
