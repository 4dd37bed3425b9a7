"""Collectives of a group of ranks of a pool, which may meet over two networks: inside hosts or supernodes, and across.

Hierarchical collectives do on the inner network what they can, so that only a share of the bytes leaves it.
"""

from __future__ import annotations

from math import ceil, log2

from rlflow.cost.machine import Link, Machine
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """Ways to do a collective, each (seconds, seconds a byte): affine in the size of the message."""

    ways: tuple[tuple[float, float], ...] = ()

    def fastest(self, size: float) -> float:
        """Of alternatives."""
        if not self.ways or size <= 0:
            return 0.0
        return min(latency + each * size for latency, each in self.ways)

    def slowest(self, size: float) -> float:
        """Of parts that run at the same time."""
        if not self.ways or size <= 0:
            return 0.0
        return max(latency + each * size for latency, each in self.ways)

    def scaled(self, factor: float) -> Network:
        """For sizes in another unit, of `factor` bytes."""
        return Network(tuple((latency, each * factor) for latency, each in self.ways))


@dataclass(frozen=True, slots=True)
class Group:
    """`size` ranks whose numbers are `stride` apart, as an axis of a mesh over a pool has them."""

    size: int
    stride: int = 1

    def levels(self, machine: Machine) -> tuple[tuple[int, Link], ...]:
        """How many ranks meet over which link, innermost first. The product of the numbers is the size.

        A group that does not fill hosts evenly meets in smaller blocks, those that divide its size.
        """
        if self.size <= 1:
            return ()
        inside = self._together(machine.supernode_devices)
        found: list[tuple[int, Link]] = []
        if inside > 1:
            link = machine.link_inside()
            # In a full mesh a device has one link to every neighbour, and a small group uses few of them.
            pair, near = machine.pair_bytes_per_s, self._together(machine.host_devices)
            if pair is not None and near < machine.host_devices:
                link = Link(min(link.bytes_per_s, pair * max(1, near - 1)), link.latency_s)
            found.append((inside, link))
        if self.size > inside:
            found.append((self.size // inside, machine.link_across()))
        return tuple(found)

    def all_inside(self, machine: Machine) -> bool:
        """All ranks share a host or supernode."""
        return self._together(machine.supernode_devices) == self.size

    def all_reduce(self, size: float, machine: Machine) -> float:
        """The faster of a hierarchical ring (reduce-scatter inside, all-reduce across, all-gather inside) and a tree
        over the slowest link."""
        return self.all_reduce_network(machine).fastest(size)

    def all_gather(self, size: float, machine: Machine) -> float:
        """Hierarchical: every rank gathers its share across, then the shares inside. Reduce-scatter costs the same."""
        return self.all_gather_network(machine).fastest(size)

    def all_to_all(self, size: float, machine: Machine, across_share: float = 1.0) -> float:
        """Every rank holds `size` bytes for the group; the two networks work at the same time.

        `across_share`: what is left of the bytes that leave the host when every token is sent once to a host and
        copied there (DeepSeek-V3, arXiv 2412.19437).
        """
        return self.all_to_all_network(machine, across_share).slowest(size)

    def all_gather_network(self, machine: Machine) -> Network:
        levels = self.levels(machine)
        latency = each = 0.0
        share = 1.0
        for n, link in levels:
            latency += (n - 1) * link.latency_s
            each += (n - 1) / n * share / link.bytes_per_s
            share /= n
        return Network(((latency, each),)) if levels else Network()

    def all_reduce_network(self, machine: Machine) -> Network:
        levels = self.levels(machine)
        if not levels:
            return Network()
        latency, each = self.all_gather_network(machine).ways[0]
        slowest = levels[-1][1]
        tree = (2 * ceil(log2(self.size)) * slowest.latency_s, 2 / slowest.bytes_per_s)
        return Network(((2 * latency, 2 * each), tree))

    def all_to_all_network(self, machine: Machine, across_share: float = 1.0) -> Network:
        levels = self.levels(machine)
        if not levels:
            return Network()
        n, link = levels[0]
        near = n if len(levels) == 2 or self.all_inside(machine) else 1
        ways = []
        if near > 1:
            ways.append(((near - 1) * link.latency_s, (near - 1) / self.size / link.bytes_per_s))
        if self.size > near:
            link, far = levels[-1][1], self.size - near
            blocks = self.size // near - 1
            ways.append((blocks * link.latency_s, far / self.size * across_share / link.bytes_per_s))
        return Network(tuple(ways))

    def _together(self, devices: int) -> int:
        """Ranks of the group that share a block of so many consecutive devices: a divisor of its size."""
        if self.stride >= devices:
            return 1
        fit = min(self.size, devices // self.stride)
        while self.size % fit:
            fit -= 1
        return fit
