"""The two ends of a reshard, and the links between devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from rlflow.ir.flow import Layout
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.storage import Storage
from rlflow.values import dataclass

if TYPE_CHECKING:
    from rlflow.cluster.spec import Cluster


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A layout on devices: `devices[rank]` is the global number of the device of that rank."""

    layout: Layout
    devices: tuple[int, ...]
    storage: Storage = field(default_factory=Storage)

    def __post_init__(self) -> None:
        if len(self.devices) != self.layout.size:
            raise ReshardError(f"the layout has {self.layout.size} ranks, {len(self.devices)} devices are given")
        if len(set(self.devices)) < len(self.devices):
            raise ReshardError("a device is given more than once")


@dataclass(frozen=True, slots=True)
class Fabric:
    """Bandwidths in byte/s, each way: of a device's own port, and of all that leaves or enters its node.

    A node is whatever shares a fast network: a host, or a supernode. Its uplink is one link; that a single device may
    reach only part of it is not modelled, since plans spread what enters a node over its devices.
    """

    node_of: tuple[int, ...]
    """Node of every device."""
    device_bandwidth: tuple[float, ...]
    node_bandwidth: Mapping[int, float]

    @classmethod
    def uniform(cls, devices: int, per_node: int, device_bandwidth: float, node_bandwidth: float) -> Fabric:
        """`per_node` devices a node in order."""
        nodes = tuple(device // per_node for device in range(devices))
        return cls(nodes, (device_bandwidth,) * devices, {node: node_bandwidth for node in sorted(set(nodes))})

    @classmethod
    def of_cluster(cls, cluster: Cluster, unknown: float) -> Fabric:
        """Devices numbered host by host; the hosts of a supernode are one node. `unknown`: where there are no facts.

        A port has the scale-up bandwidth of its device, an uplink the scale-out bandwidth of the node's devices.
        """
        numbers: dict[str, int] = {}
        node_of: list[int] = []
        ports: list[float] = []
        uplinks: dict[int, float] = {}
        for index, host in enumerate(cluster.hosts):
            key = f"supernode {host.supernode}" if host.supernode else f"host {index}"
            node = numbers.setdefault(key, len(numbers))
            port = float(host.facts.get("scaleup_bytes_per_s", unknown))
            uplink = float(host.facts.get("scaleout_bytes_per_s", unknown))
            node_of += [node] * host.devices
            ports += [port] * host.devices
            uplinks[node] = uplinks.get(node, 0.0) + uplink * host.devices
        return cls(tuple(node_of), tuple(ports), uplinks)

    def check(self, endpoint: Endpoint) -> None:
        """ReshardError for a device that the fabric does not have."""
        unknown = [d for d in endpoint.devices if not 0 <= d < len(self.node_of)]
        if unknown:
            raise ReshardError(f"devices {unknown} are not among the {len(self.node_of)} of the fabric")
