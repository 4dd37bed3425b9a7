"""Bandwidth and latency between two devices of a cluster, from the facts of their types."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from rlflow.cluster.spec import Cluster, Host
from rlflow.cost.errors import LayoutError
from rlflow.cost.knobs import Calibration, calibration
from rlflow.cost.machine import Device, Link, device_of
from rlflow.values import dataclass


class Tier(StrEnum):
    """How far two devices are from each other."""

    DEVICE = "same device"
    PACKAGE = "same package"
    HOST = "same host"
    SUPERNODE = "same supernode"
    ACROSS = "across"


@dataclass(frozen=True, slots=True)
class Place:
    """A device of a cluster: its host and its number there."""

    host: Host
    index: int


def place(cluster: Cluster, number: int) -> Place:
    """Device `number` of a cluster, counted host by host. LayoutError outside of it."""
    left = number
    for host in cluster.hosts:
        if 0 <= left < host.devices:
            return Place(host, left)
        left -= host.devices
    raise LayoutError(f"cluster `{cluster.name}` has {cluster.num_devices} devices, and no number {number}")


def tier(a: Place, b: Place) -> Tier:
    if a.host.name == b.host.name:
        if a.index == b.index:
            return Tier.DEVICE
        dies = int(a.host.facts.get("dies_per_package", 1))
        same_package = dies > 1 and a.index // dies == b.index // dies
        return Tier.PACKAGE if same_package else Tier.HOST
    if a.host.supernode is not None and a.host.supernode == b.host.supernode:
        return Tier.SUPERNODE
    return Tier.ACROSS


def link(cluster: Cluster, src: int, dst: int, tuned: Mapping[str, Calibration] | None = None) -> Link:
    """What one transfer between two devices of a cluster reaches; the slower end decides.

    `tuned` has calibrations by hardware family, in place of the shipped ones. UnknownFactError names a missing fact.
    """
    a, b = place(cluster, src), place(cluster, dst)
    distance = tier(a, b)
    ends = [_end(device_of(end.host), distance, tuned) for end in (a, b)]
    return Link(min(end.bytes_per_s for end in ends), max(end.latency_s for end in ends))


def _end(device: Device, distance: Tier, tuned: Mapping[str, Calibration] | None) -> Link:
    family = device.family
    constants = (tuned[family] if tuned and family in tuned else calibration(family)).constants
    if distance is Tier.DEVICE:
        # A copy reads and writes the same memory.
        return Link(device.memory_bytes_per_s * constants.memory_copy / 2, 0.0)
    if distance is Tier.ACROSS:
        return Link(device.rate("scaleout_bytes_per_s") * constants.link_across, constants.latency_across_s)
    fact = "scaleup_bytes_per_s"
    if distance is Tier.PACKAGE:
        fact = "die_to_die_bytes_per_s"
    elif "scaleup_pair_bytes_per_s" in device.facts:
        fact = "scaleup_pair_bytes_per_s"  # a full mesh: one peer gets one of the links
    return Link(device.rate(fact) * constants.link_inside, constants.latency_inside_s)
