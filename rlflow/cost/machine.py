"""What one device can do, and how the devices of a pool hang together; from the facts of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.cluster.spec import Cluster, Host
from rlflow.cost.errors import LayoutError, UnknownFactError
from rlflow.cost.knobs import FAMILIES, Calibration, calibration
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """One direction, as seen by one device. Bytes and seconds as software reaches them, not as the wire could."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Device:
    """One logical device of a host. The facts keep their names from hardware.toml; a missing one is an error."""

    name: str
    facts: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def family(self) -> str:
        return "cpu" if self.name == "cpu" else FAMILIES[str(self._fact("vendor"))]

    @property
    def flop_per_s(self) -> float:
        """Dense peak of 16-bit products."""
        return float(self._fact("peak_bf16_flop_per_s"))

    @property
    def memory_bytes(self) -> int:
        return int(self._fact("hbm_bytes"))

    @property
    def memory_bytes_per_s(self) -> float:
        return float(self._fact("hbm_bytes_per_s"))

    def host_link(self, *, to_host: bool, all_busy: bool) -> float:
        """Peak bytes/s between a device and its host's memory; `all_busy`: all devices of the host copy at once."""
        peak = float(self._fact("host_write_bytes_per_s" if to_host else "host_read_bytes_per_s"))
        shared = self.facts.get("host_link_all_dies_busy_bytes_per_s")
        return min(peak, float(shared)) if all_busy and shared is not None else peak

    def rate(self, fact: str) -> float:
        """A bandwidth by its name in hardware.toml. UnknownFactError where it is not known."""
        return float(self._fact(fact))

    def _fact(self, name: str) -> Any:
        if name not in self.facts:
            raise UnknownFactError(f"the device `{self.name}`", name)
        return self.facts[name]


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of a pool: one type, hosts of equal size, filled one after the other.

    `inside` joins the devices of a host, `supernode` the hosts of a supernode, `across` everything else; None where the
    facts do not say, which is an error only if something has to use it.
    """

    device: Device
    calibration: Calibration
    flop_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    host_devices: int
    """Devices of one host."""
    supernode_devices: int
    """Devices that the scale-up network joins; that of one host where there is no supernode."""
    inside: Link | None
    across: Link | None
    pair_bytes_per_s: float | None = None
    """What two devices of a host share where every pair has a link of its own (full mesh)."""

    def __hash__(self) -> int:
        return hash((self.device.name, self.host_devices, self.supernode_devices))

    def link_inside(self) -> Link:
        if self.inside is None:
            raise UnknownFactError(f"the device `{self.device.name}`", "scaleup_bytes_per_s")
        return self.inside

    def link_across(self) -> Link:
        if self.across is None:
            raise UnknownFactError(f"the device `{self.device.name}`", "scaleout_bytes_per_s")
        return self.across


def device_of(host: Host) -> Device:
    return Device(host.device, host.facts)


def machine(
    cluster: Cluster, hosts: Sequence[str] = (), *, device: Device | None = None, tuned: Calibration | None = None
) -> Machine:
    """The machine that the named hosts of a cluster make (all, if none is named).

    `device` replaces the facts of the hosts' device, as a measurement of a CPU does; `tuned` the calibration of its
    family. LayoutError for hosts of several device types: a pool has one. UnknownFactError for a fact that every cost
    needs; links that are not known are missed only when they are used.
    """
    chosen = [host for host in cluster.hosts if not hosts or host.name in hosts]
    if not chosen:
        raise LayoutError(f"cluster `{cluster.name}` has none of the hosts {', '.join(hosts)}")
    types = sorted({host.device for host in chosen})
    if len(types) > 1:
        raise LayoutError(f"a pool has one type of device, and these hosts have {', '.join(types)}")
    device = device or device_of(chosen[0])
    tuned = tuned or calibration(device.family)
    per_host = min(host.devices for host in chosen)
    joined = [0]
    names = [host.supernode for host in chosen if host.supernode is not None]
    for name in dict.fromkeys(names):
        joined.append(sum(host.devices for host in chosen if host.supernode == name))
    loose = any(host.supernode is None for host in chosen)
    return Machine(
        device,
        tuned,
        device.flop_per_s,
        device.memory_bytes,
        device.memory_bytes_per_s,
        per_host,
        per_host if loose else max(per_host, min(joined[1:])),
        inside_link(device, tuned),
        across_link(device, tuned),
        _pair(device, tuned),
    )


def inside_link(device: Device, tuned: Calibration) -> Link | None:
    """The scale-up network, for a device that talks to all its neighbours at once."""
    if "scaleup_bytes_per_s" not in device.facts:
        return None
    constants = tuned.constants
    return Link(device.rate("scaleup_bytes_per_s") * constants.link_inside, constants.latency_inside_s)


def across_link(device: Device, tuned: Calibration) -> Link | None:
    if "scaleout_bytes_per_s" not in device.facts:
        return None
    constants = tuned.constants
    return Link(device.rate("scaleout_bytes_per_s") * constants.link_across, constants.latency_across_s)


def _pair(device: Device, tuned: Calibration) -> float | None:
    if "scaleup_pair_bytes_per_s" not in device.facts:
        return None
    return device.rate("scaleup_pair_bytes_per_s") * tuned.constants.link_inside
