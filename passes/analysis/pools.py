"""Which devices of the cluster each pool of the schedule gets."""

from __future__ import annotations

from rlflow.cluster.presets import torch_device
from rlflow.cluster.spec import LOCAL, Cluster, PoolRequest
from rlflow.diagnostics import Label
from rlflow.ir.flow import PoolSpec
from rlflow.passes.base import PassContext

DEFAULT_POOL = "main"
MAX_HOSTS_SHOWN = 8


def allocate_pools(context: PassContext) -> dict[str, PoolSpec]:
    """The pools with the host of every rank, devices dealt out host by host in order; without pools, one of a host.

    A pool has devices of one kind: the kind it asks for, or else the kind of the first device that is free. More
    devices than there are is an error that has been reported when this returns.
    """
    cluster = context.cluster
    requests = context.schedule.pools or (PoolRequest(DEFAULT_POOL, cluster.hosts[0].devices),)
    if cluster.name == LOCAL:
        device = torch_device(cluster.hosts[0].device)
        return {r.name: PoolSpec(r.name, device, (LOCAL,) * r.devices, r.span) for r in requests}
    free: dict[str, list[str]] = {}
    for host in cluster.hosts:
        free.setdefault(host.device, []).extend([host.name] * host.devices)
    total = {kind: len(slots) for kind, slots in free.items()}
    pools: dict[str, PoolSpec] = {}
    for request in requests:
        kind = request.device or _first_free(free, request.devices)
        if request.host_of_rank:
            pools[request.name] = PoolSpec(request.name, torch_device(kind), request.host_of_rank, request.span)
            continue
        slots = free[kind]
        if request.devices > len(slots):
            _report(context, cluster, requests, request, kind, total)
            return {r.name: PoolSpec(r.name, torch_device(kind), (cluster.hosts[0].name,), r.span) for r in requests}
        pools[request.name] = PoolSpec(request.name, torch_device(kind), tuple(slots[: request.devices]), request.span)
        del slots[: request.devices]
    return pools


def _first_free(free: dict[str, list[str]], wanted: int) -> str:
    """The first kind with enough free devices, or else the kind with the most."""
    for kind, slots in free.items():
        if len(slots) >= wanted:
            return kind
    return max(free, key=lambda kind: len(free[kind]))


def _report(
    context: PassContext,
    cluster: Cluster,
    requests: tuple[PoolRequest, ...],
    failed: PoolRequest,
    kind: str,
    total: dict[str, int],
) -> None:
    wanted = sum(request.devices for request in requests)
    table = ", ".join(f"{host.name}: {host.devices}" for host in cluster.hosts[:MAX_HOSTS_SHOWN])
    table += ", ..." if len(cluster.hosts) > MAX_HOSTS_SHOWN else ""
    subject = f"pool `{requests[0].name}` wants" if len(requests) == 1 else f"{len(requests)} pools want"
    notes = [f"devices by host: {table}"]
    if len(requests) > 1:
        notes.insert(0, "wanted: " + ", ".join(f"`{r.name}` {r.devices}" for r in requests))
    devices, have = "devices", sum(total.values())
    if len(total) > 1:
        subject, wanted, devices, have = f"pool `{failed.name}` wants", failed.devices, f"devices `{kind}`", total[kind]
        others = [r for r in requests if r is not failed and r.device in (None, kind)]
        notes.insert(0, "kinds: " + ", ".join(f"`{name}` {count}" for name, count in total.items()))
        have_text = f"{have}" + (", shared with " + ", ".join(f"`{r.name}`" for r in others) if others else "")
    else:
        have_text = f"{have}"
    context.error(
        "RLF2003",
        f"{subject} {wanted} {devices}, and cluster `{cluster.name}` has {have_text}",
        failed.span if len(total) > 1 else requests[-1].span,
        related=() if cluster.span is None else (Label(cluster.span, "", primary=False),),
        notes=tuple(notes),
        help=(f"at most `{have} devices`" + (" in all" if len(requests) > 1 else ""),),
    )
