"""On which hosts the CPU workers of Python stages run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from rlflow.diagnostics import Label, Span
from rlflow.ir.flow import Flow
from rlflow.ir.ops import Score
from rlflow.passes.analysis.homes import homes_of
from rlflow.passes.analysis.host_cpus import MAX_HOSTS_SHOWN, Demand, enough_cpus
from rlflow.passes.base import PassContext


def host_tiers(flow: Flow, context: PassContext) -> tuple[tuple[str, ...], ...]:
    """Hosts in three tiers, the best for workers first: of the pools that call them, of other pools, the rest."""
    homes = homes_of(flow)
    callers = {homes[node.id] for node in flow.nodes.values() if isinstance(node.op, Score)}
    tiers: list[list[str]] = [[], [], []]
    for pool in flow.pools.values():
        tiers[0 if pool.name in callers else 1] += pool.host_of_rank
    tiers[2] = [host.name for host in context.cluster.hosts]
    seen: set[str] = set()
    found = []
    for tier in tiers:
        found.append(tuple(host for host in dict.fromkeys(tier) if host not in seen))
        seen.update(tier)
    return tuple(found)


def spread(workers: int, tiers: Sequence[Sequence[str]], found: Mapping[str, Demand]) -> tuple[str, ...] | None:
    """The host of every worker; None when the hosts have fewer CPUs left than there are workers.

    A tier is filled before the next one is used; within it the host with the fewest workers gets the next, as long as
    it has a CPU left. A host whose CPUs are not known is never full.
    """
    of_host: dict[str, int] = {}
    missing = workers
    for tier in tiers:
        waiting = [(0, place, host) for place, host in enumerate(tier) if _room(found[host]) != 0]
        while missing and waiting:
            count, place, host = heappop(waiting)
            room = _room(found[host])
            of_host[host] = count + 1
            missing -= 1
            if room is None or count + 1 < room:
                heappush(waiting, (count + 1, place, host))
    if missing:
        return None
    return tuple(host for tier in tiers for host in tier for _ in range(of_host.get(host, 0)))


def _room(demand: Demand) -> int | None:
    return None if demand.left is None else max(0, demand.left)


def report_workers(
    workers: int, span: Span | None, found: Mapping[str, Demand], flow: Flow, context: PassContext
) -> None:
    """Too many Python workers: both numbers, the sum of every host, and the nearest numbers that fit."""
    left = sum(_room(demand) or 0 for demand in found.values())
    asked = sum(demand.total for demand in found.values()) + workers
    have = sum(demand.cpus or 0 for demand in found.values())
    shown = list(found.values())[:MAX_HOSTS_SHOWN]
    table = [f"`{d.host}`: {d.cpus} CPUs, {d.words} asked for, {_room(d)} left" for d in shown]
    more = len(found) - len(shown)
    fixes = [f"at most `workers = {left}`"] if left else []
    fixes.append(f"hosts of at least `cpus = {enough_cpus(found, workers)}`")
    one = workers == 1
    context.error(
        "RLF2009",
        f"{workers} Python worker{' asks' if one else 's ask'} for {workers} CPU{'' if one else 's'}, and the hosts of "
        f"cluster `{context.cluster.name}` have {left} left",
        span or flow.span,
        related=() if context.cluster.span is None else (Label(context.cluster.span, "", primary=False),),
        notes=(*table, *([f"and {more} more hosts"] if more > 0 else []), f"in all {asked} > {have}"),
        help=(", or ".join(fixes),),
    )
