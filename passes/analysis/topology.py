"""Groups of ranks against the hardware: the memory that each takes on a device, and the links that it talks over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlflow.amounts import gib
from rlflow.communicators import DEFAULT_MIB, LEAST_MIB, buffer_mib, communicators
from rlflow.diagnostics import Span
from rlflow.ir.decisions import Memory, Reshard
from rlflow.ir.flow import Flow, PoolSpec
from rlflow.passes.base import PassContext

if TYPE_CHECKING:
    from rlflow.passes.analysis.costs import Costs


def check_groups(flow: Flow, costs: Costs, context: PassContext) -> None:
    """RLF2020 where not even small communicators fit beside what a device holds, RLF2021 for tp over the slow links."""
    fullest = {memory.pool: memory for memory in flow.decided(Memory)}
    for pool in flow.pools.values():
        nodes = [node for node in flow.nodes.values() if node.placement and node.placement.pool == pool.name]
        layouts = [node.placement.layout for node in nodes if node.placement and node.placement.layout]
        if pool.device == "npu" and pool.name in fullest:
            exchanges = [r for r in flow.decided(Reshard) if r.source != r.target and pool.name in (r.source, r.target)]
            _check_buffers(pool, fullest[pool.name], communicators(layouts, len(exchanges)), context)
        if pool.device in ("npu", "cuda"):
            for node in nodes:
                if node.placement and node.placement.layout:
                    _check_links(node.id, node.span, node.placement.layout.tp, pool, costs, context)


def _check_buffers(pool: PoolSpec, memory: Memory, groups: int, context: PassContext) -> None:
    total = memory.capacity + memory.reserved
    room = max(0, total - memory.peak)
    if buffer_mib(groups, room) >= LEAST_MIB:
        return  # the ranks get what fits (rlflow.device_rules)
    least = 2 * groups * LEAST_MIB << 20
    context.error(
        "RLF2020",
        f"the {groups} communicators of a device of pool `{pool.name}` need {gib(least)} at least, "
        f"and {gib(room)} are free",
        pool.span,
        notes=(
            f"HCCL takes two buffers for each, of {DEFAULT_MIB} MiB or of {LEAST_MIB} at least",
            f"stages use up to {gib(memory.peak)} of {gib(total)}",
        ),
        help=(
            f"keep more of a device free: `memory = {max(0, total - least) >> 30} GiB` on the pool",
            "use the same layout for more stages: equal groups share a communicator",
        ),
    )


def _check_links(stage: str, span: Span | None, tp: int, pool: PoolSpec, costs: Costs, context: PassContext) -> None:
    joined = {host.name: host.supernode or host.name for host in context.cluster.hosts}
    places = [joined.get(host, host) for host in pool.host_of_rank]
    split = next((places[i : i + tp] for i in range(0, len(places), tp) if len(set(places[i : i + tp])) > 1), None)
    if split is None:
        return
    machine = costs.machine(pool)
    speeds: tuple[str, ...] = ()
    if machine is not None and machine.inside is not None and machine.across is not None:
        inside, across = machine.inside.bytes_per_s / 1e9, machine.across.bytes_per_s / 1e9
        speeds = (f"a device reaches {inside:.0f} GB/s inside a host and {across:.0f} GB/s between hosts",)
    most = max(places.count(name) for name in set(places))
    context.warn(
        "RLF2021",
        f"tp {tp} of `{stage}` spans {len(set(split))} hosts that no fast network joins",
        span,
        notes=("tensor parallel ranks exchange activations twice in every layer", *speeds),
        help=(
            f"use tp {_largest_divisor(tp, most)} at most, and a larger pp or dp",
            "or a cluster whose hosts are one supernode",
        ),
    )


def _largest_divisor(tp: int, most: int) -> int:
    return max(size for size in range(1, tp + 1) if tp % size == 0 and most % size == 0)
