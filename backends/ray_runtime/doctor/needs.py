"""What a plan needs of the hosts that it runs on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rlflow.plan import Plan

RESOURCES = {"npu": "NPU", "cuda": "GPU"}
"""Kind of device to Ray's name for it."""


@dataclass(frozen=True)
class Needs:
    """`ranks`: processes of rlflow, each with a CPU. `workers`: processes of Python functions. `devices`: for every
    kind of device (Ray's name) how many on one host, most first."""

    ranks: int
    workers: int
    devices: dict[str, tuple[int, ...]]

    @property
    def resources(self) -> dict[str, float]:
        """In all, as Ray counts."""
        return {"CPU": float(self.ranks)} | {name: float(sum(hosts)) for name, hosts in self.devices.items()}


def needs(plan: Plan) -> Needs:
    ranks = workers = 0
    hosts: dict[str, Counter[str]] = {}
    for pool in plan.pools:
        if pool.device == "functions":
            workers += len(pool.ranks)
            continue
        ranks += len(pool.ranks)
        if pool.device in RESOURCES:
            counts = hosts.setdefault(RESOURCES[pool.device], Counter())
            counts.update(host for host, _ in {(place.host, place.index) for place in pool.ranks})
    return Needs(ranks, workers, {name: tuple(sorted(c.values(), reverse=True)) for name, c in sorted(hosts.items())})
