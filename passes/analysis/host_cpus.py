"""The CPUs that a plan asks of every host, against what the cluster says its hosts have.

A runtime that asks for more CPUs than a host has waits for them for ever, while the devices stand idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlflow.diagnostics import Label, Span
from rlflow.ir.flow import Flow
from rlflow.ir.ops import Generate
from rlflow.passes.analysis.crossings import crossings
from rlflow.passes.base import PassContext
from rlflow.values import dataclass

MAX_HOSTS_SHOWN = 4
RANKS, ENVIRONMENTS, QUEUES, DRIVER = "rank", "environment worker", "queue", "driver"


@dataclass(frozen=True, slots=True)
class Demand:
    """CPUs asked of one host beside its Python workers: what asks for them, and how many, one CPU each."""

    host: str
    cpus: int | None
    """What the host has; None where the cluster does not say."""
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(count for _, count in self.parts)

    @property
    def left(self) -> int | None:
        """CPUs for Python workers, below 0 where there are too few already; None = not known."""
        return None if self.cpus is None else self.cpus - self.total

    @property
    def words(self) -> str:
        """The sum, such as `8 ranks x 1 + 2 queues x 1 + driver 1 = 11`; `0` where nothing is asked for."""
        terms = [f"{n} {what}{'s' * (n != 1)} x 1" if what != DRIVER else f"{DRIVER} {n}" for what, n in self.parts]
        return " + ".join(terms) + f" = {self.total}" if terms else "0"


def demands(flow: Flow, context: PassContext) -> dict[str, Demand]:
    """What the placed flow asks of every host of the cluster, in the cluster's order.

    Every rank asks for one CPU; every rank that generates with an environment for one more, for the process that the
    environment runs in; every queue between pools for one on the first host of the pool that reads it; the driver for
    one on the cluster's first host.
    """
    asked: dict[str, dict[str, int]] = {host.name: {} for host in context.cluster.hosts}

    def ask(host: str, what: str) -> None:
        asked[host][what] = asked[host].get(what, 0) + 1

    for pool in flow.pools.values():
        for host in pool.host_of_rank:
            ask(host, RANKS)
    for pool_name, _ in _environments(flow):
        for host in flow.pools[pool_name].host_of_rank:
            ask(host, ENVIRONMENTS)
    for readers in crossings(flow).values():
        for pool_name in readers:
            ask(flow.pools[pool_name].host_of_rank[0], QUEUES)
    ask(context.cluster.hosts[0].name, DRIVER)
    return {host.name: Demand(host.name, host.cpus, tuple(asked[host.name].items())) for host in context.cluster.hosts}


def _environments(flow: Flow) -> dict[tuple[str, str], None]:
    """Every pool with the environments that its generate stages use, each once."""
    return {
        (node.placement.pool, node.op.environment): None
        for node in flow.nodes.values()
        if isinstance(node.op, Generate) and node.op.environment is not None and node.placement is not None
    }


def enough_cpus(found: Mapping[str, Demand], workers: int) -> int:
    """The least CPUs of every host with which all of this and so many Python workers fit, if all hosts have as many."""
    asked = sum(demand.total for demand in found.values()) + workers
    most = max(demand.total for demand in found.values())
    return most if any(demand.cpus is None for demand in found.values()) else max(most, -(-asked // len(found)))


def check_demands(flow: Flow, found: Mapping[str, Demand], workers: int, context: PassContext) -> None:
    """Report the hosts that have fewer CPUs than ranks, environments, queues and the driver ask for.

    `workers` of Python functions come on top, and count for what would be enough.
    """
    short = [demand for demand in found.values() if demand.left is not None and demand.left < 0]
    if not short:
        return
    worst = min(short, key=lambda demand: demand.left or 0)
    assert worst.cpus is not None
    fixes = [f"hosts of at least `cpus = {enough_cpus(found, workers)}`"]
    ranks = dict(worst.parts).get(RANKS, 0)
    fewer = ranks - -(-(worst.total - worst.cpus) // _freed_by_a_rank(flow, worst.host))
    if fewer > 0:
        fixes.append(f"pools with at most {fewer} of its devices")
    context.error(
        "RLF2009",
        f"the plan asks for {worst.total} CPUs of host `{worst.host}`, which has {worst.cpus}",
        _pool_span(flow, worst.host),
        related=_cluster_label(context),
        notes=tuple(_sums(worst, short)),
        help=(", or ".join(fixes),),
    )


def _freed_by_a_rank(flow: Flow, host: str) -> int:
    """CPUs that one device less on the host frees at least: its rank's, and those of the environments it runs."""
    running = [pool_name for pool_name, _ in _environments(flow)]
    pools = [pool.name for pool in flow.pools.values() if host in pool.host_of_rank]
    return min((1 + running.count(name) for name in pools), default=1)


def _sums(worst: Demand, short: list[Demand]) -> Iterator[str]:
    yield f"{worst.words} > {worst.cpus}"
    others = [f"`{d.host}` {d.total} > {d.cpus}" for d in short if d is not worst]
    if others:
        more = len(others) - MAX_HOSTS_SHOWN
        yield "also: " + ", ".join(others[:MAX_HOSTS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _pool_span(flow: Flow, host: str) -> Span | None:
    return next((pool.span for pool in flow.pools.values() if host in pool.host_of_rank), flow.span)


def _cluster_label(context: PassContext) -> tuple[Label, ...]:
    span = context.cluster.span
    return () if span is None else (Label(span, "", primary=False),)
