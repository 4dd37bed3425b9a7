"""The hosts that a plan runs on, grouped by what each of them must have."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rlflow.cluster.spec import Cluster
from rlflow.plan import Plan

SHARE = 0.9
"""Of a host's memory and CPUs that a pod asks for: a Kubernetes node keeps some of both for itself."""


@dataclass(frozen=True)
class HostGroup:
    """Hosts that are alike. `devices`: how many of a host the plan uses, 0 for CPU hosts."""

    name: str
    kind: str
    """npu, cuda or cpu."""
    device: str
    """As the cluster names it."""
    hosts: int
    devices: int
    processes: int
    """Ranks and workers of Python functions on the fullest host: a CPU for each."""
    cpus: int | None
    memory_bytes: int | None

    @property
    def ray_cpus(self) -> int:
        """What Ray is told that a host has."""
        return max(self.cpus or 0, self.processes)

    @property
    def resource(self) -> str:
        """Ray's name for the devices; "" for CPU hosts."""
        return {"npu": "NPU", "cuda": "GPU"}.get(self.kind, "")


def host_groups(plan: Plan, cluster: Cluster) -> tuple[HostGroup, ...]:
    """The groups of hosts that the plan's pools lie on, in the cluster's order."""
    devices: dict[str, set[int]] = defaultdict(set)
    processes: dict[str, int] = defaultdict(int)
    for pool in plan.pools:
        for place in pool.ranks:
            processes[place.host] += 1
            if pool.device in ("npu", "cuda"):
                devices[place.host].add(place.index)
    alike: dict[tuple[str, str, int | None, int | None], list[str]] = defaultdict(list)
    for host in cluster.hosts:
        if host.name in processes:
            alike[host.torch_device, host.device, host.cpus, host.memory_bytes].append(host.name)
    return tuple(
        HostGroup(
            name=f"hosts-{number}",
            kind=kind,
            device=device,
            hosts=len(names),
            devices=max(len(devices[name]) for name in names),
            processes=max(processes[name] for name in names),
            cpus=cpus,
            memory_bytes=memory,
        )
        for number, ((kind, device, cpus, memory), names) in enumerate(alike.items())
    )
