"""Hosts, devices and who lives on them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from rlflow.amounts import seconds, size
from rlflow.backends.visualizers.words import describe_instruction, describe_layout, describe_pool
from rlflow.plan import Layout, Plan, Pool


@dataclass(frozen=True, slots=True)
class Tenant:
    """A stage on a pool, in words."""

    stage: str
    layout: str
    time: str


@dataclass(frozen=True, slots=True)
class Household:
    """A pool, who lives there, and what its ranks execute every step."""

    name: str
    devices: str
    hosts: str
    memory: str
    tenants: tuple[Tenant, ...]
    instructions: tuple[str, ...]


def households(plan: Plan) -> list[Household]:
    times = {estimate.stage: estimate.us for estimate in plan.estimates}
    memory = {found.pool: f"{size(found.peak)} of {size(found.capacity)}" for found in plan.memory}
    programs = {program.pool: program.step for program in plan.programs}
    return [
        Household(
            pool.name,
            describe_pool(pool),
            _hosts(pool),
            memory.get(pool.name, ""),
            tuple(
                Tenant(
                    stage.id,
                    "" if stage.layout is None else "whole on every device" if stage.layout == Layout() else
                    describe_layout(stage.layout),
                    seconds(times[stage.id]) if stage.id in times else "",
                )
                for stage in plan.stages
                if stage.pool == pool.name
            ),
            tuple(describe_instruction(i) for i in programs.get(pool.name, ())),
        )
        for pool in plan.pools
    ]  # fmt: skip


def _hosts(pool: Pool) -> str:
    names = list(dict.fromkeys(rank.host for rank in pool.ranks))
    return names[0] if len(names) == 1 else f"{len(names)} hosts, {names[0]} to {names[-1]}" if names else "none"


def placement_of(plan: Plan) -> list[dict[str, Any]]:
    """Hosts in the order of the plan; each has runs of devices `[first index, first rank, count, number of the pool]`.

    Pools of functions take CPUs rather than devices: `[number of the pool, workers]` under `functions`.
    """
    hosts: dict[str, dict[str, Any]] = {}
    for number, pool in enumerate(plan.pools):
        workers: dict[str, int] = defaultdict(int)
        for rank in pool.ranks:
            host = hosts.setdefault(rank.host, {"name": rank.host, "devices": [], "functions": []})
            if pool.device == "functions":
                workers[rank.host] += 1
                continue
            runs = host["devices"]
            if runs and runs[-1][3] == number and runs[-1][0] + runs[-1][2] == rank.index and (
                runs[-1][1] + runs[-1][2] == rank.rank
            ):  # fmt: skip
                runs[-1][2] += 1
            else:
                runs.append([rank.index, rank.rank, 1, number])
        for name, count in workers.items():
            hosts[name]["functions"].append([number, count])
    return list(hosts.values())
