"""insert-swaps: what leaves device memory and comes back, and when, so that every stage fits."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from rlflow.amounts import GIB, gib, size, whole_us
from rlflow.diagnostics import Span
from rlflow.ir.decisions import Decision, Memory, MemoryPhase, Reshard, Swap
from rlflow.ir.flow import STEP, Flow, Node, PoolSpec, Stage, reads_model
from rlflow.ir.ops import Generate, Train
from rlflow.passes.base import Pass, PassContext
from rlflow.values import dataclass

if TYPE_CHECKING:
    from rlflow.passes.analysis.costs import Costs
    from rlflow.passes.analysis.memory.choice import Infeasible
    from rlflow.passes.analysis.memory.objects import Device, Period, Resident
    from rlflow.passes.analysis.memory.swap import SwapPlan
    from rlflow.passes.analysis.residents import Arrival, Placed

UNKNOWN_HOST_BYTES = 2**60
"""Where a cluster does not say how much memory its hosts have, it is no limit."""
HOST_SHARE = 0.9
"""Of a host's memory that swapped objects may take."""


@dataclass(frozen=True, slots=True)
class InsertSwaps(Pass):
    """Lay out the memory of every device over one step, and move what does not fit.

    Where everything fits nothing moves. Otherwise the interval program chooses what leaves in which gap between its
    uses, at the least cost of copying and rebuilding; caches of keys and values take what generation leaves them. Where
    a reshard cannot have both layouts on a device, and where the schedule says so, it is done in place. What cannot fit
    even so is an error that names the stage, both numbers and what is needed at once. Pools whose devices or models are
    not known in bytes are left alone; a pool of CPUs is known where the schedule states its `memory`.
    """

    name: ClassVar[str] = "insert-swaps"
    requires: ClassVar[Stage] = Stage.SCHEDULED
    ensures: ClassVar[Stage] = Stage.SCHEDULED

    def run(self, flow: Flow, context: PassContext) -> Flow:
        planned = [pool for pool in flow.pools.values() if _has_limit(pool, context)]
        if not planned:
            return flow
        from rlflow.passes.analysis.costs import Costs

        costs = Costs(flow, context)
        for pool in planned:
            flow, decided = _plan_pool(flow, pool, costs, context)
            flow = replace(flow, decisions=(*flow.decisions, *decided))
        return flow


def _has_limit(pool: PoolSpec, context: PassContext) -> bool:
    if pool.device == "functions":
        return False
    return pool.device != "cpu" or any(r.name == pool.name and r.memory_bytes for r in context.schedule.pools)


def _plan_pool(flow: Flow, pool: PoolSpec, costs: Costs, context: PassContext) -> tuple[Flow, list[Decision]]:
    """The flow with the reshards of the pool that are done in place, and what is decided about its memory."""
    from rlflow.passes.analysis.in_place import chosen, done_as_pinned, next_in_place
    from rlflow.passes.analysis.memory.choice import Infeasible
    from rlflow.passes.analysis.memory.swap import plan_swaps

    device = _device(pool, costs, context)
    if device is None:
        return flow, []
    stages = _stages(flow, pool, costs, device.hbm_bytes, context)
    if not stages:
        return flow, []
    swapping = _may_swap(pool, context)
    flow = done_as_pinned(flow, pool, swapping, costs)
    if context.has_errors:
        return flow, []
    choices: list[Decision] = []
    beside: Infeasible | None = None
    while True:
        residents, period = _residents(flow, pool, stages, device)
        residents = _fit_caches(residents, period, stages, device, swapping)
        if not swapping:
            residents = [replace(resident, needed=frozenset(p.name for p in period.phases)) for resident in residents]
        found = plan_swaps(residents, period, device)
        if not isinstance(found, Infeasible):
            return flow, [*choices, *_decisions(flow, pool, found, residents, period, device, costs, context)]
        other = next_in_place(flow, pool, found, swapping, costs)
        beside = beside or found
        if other is None or isinstance(other, str):
            _report(flow, pool, beside, device, swapping, context, other)
            return flow, []
        flow, reshard = other
        choices.append(chosen(reshard, found))


def _device(pool: PoolSpec, costs: Costs, context: PassContext) -> Device | None:
    """Memory and host link of one device of the pool; None where they are not known."""
    from rlflow.cost.errors import UnknownFactError
    from rlflow.passes.analysis.cpu_memory import machine_of
    from rlflow.passes.analysis.fit import usable_bytes
    from rlflow.passes.analysis.memory.objects import Device

    machine = machine_of(pool, costs, context)
    if machine is None:
        return None
    hosts = {host.name: host for host in context.cluster.hosts}
    mine = [hosts[name] for name in dict.fromkeys(pool.host_of_rank)]
    capacity = usable_bytes(pool, machine, context)
    shares = [round(host.memory_bytes * HOST_SHARE) // host.devices for host in mine if host.memory_bytes is not None]
    host_bytes = min(shares) if len(shares) == len(mine) else UNKNOWN_HOST_BYTES
    link = machine.calibration.constants.host_link
    try:
        rates = [machine.device.host_link(to_host=out, all_busy=True) * link for out in (True, False)]
    except UnknownFactError:
        return Device(capacity, 0, 1, 1)  # without a known link to the host nothing is swapped to it
    return Device(capacity, host_bytes, round(rates[0]), round(rates[1]))


def _stages(flow: Flow, pool: PoolSpec, costs: Costs, capacity: int, context: PassContext) -> list[Placed]:
    """The model stages of the pool in their order. Empty, where something about one of them is not known."""
    from rlflow.cost.errors import CostError
    from rlflow.passes.analysis.cpu_memory import machine_of
    from rlflow.passes.analysis.residents import Placed

    on = machine_of(pool, costs, context)
    found: list[Placed] = []
    nodes = sorted(flow.phase_nodes(STEP), key=lambda node: node.slot or 0)
    for node in nodes:
        if node.placement is None or node.placement.pool != pool.name or node.placement.layout is None:
            continue
        try:
            cost = costs.cost(node, on=on, memory_bytes=capacity)
        except CostError as error:
            context.error("RLF2001", f"`{node.id}` cannot be laid out: {error}", node.span)
            return []
        if cost is None:
            return []
        least = 0
        if isinstance(node.op, Generate):
            smallest = costs.cost(node, on=on, memory_bytes=1)
            least = 0 if smallest is None else smallest.static.kv_cache
        measured = replace(cost, seconds=cost.seconds * costs.factor(node, memory_bytes=capacity))
        found.append(Placed(node, measured, least, merged=_merged(flow, node, costs)))
    return found


def _merged(flow: Flow, node: Node, costs: Costs) -> int:
    """Bytes of the layers of which a stage reads a copy with adapters added in: what samples, and what is elsewhere."""
    from rlflow.passes.analysis.adapted import lora_of, merged_bytes

    model = reads_model(node.op)
    assert model is not None
    trainer = next((n for n in flow.nodes.values() if isinstance(n.op, Train) and n.op.model == model), None)
    if lora_of(flow, model) is None or trainer is None or node.id == trainer.id:
        return 0
    here, there = trainer.placement, node.placement
    assert here is not None and here.layout is not None  # noqa: PT018
    assert there is not None and there.layout is not None  # noqa: PT018
    same = here.pool == there.pool and here.layout.weights == there.layout.weights
    return 0 if same and not isinstance(node.op, Generate) else merged_bytes(model, there.layout, costs)


def _may_swap(pool: PoolSpec, context: PassContext) -> bool:
    return next((request.swap for request in context.schedule.pools if request.name == pool.name), True)


def _residents(flow: Flow, pool: PoolSpec, stages: list[Placed], device: Device) -> tuple[list[Resident], Period]:
    from rlflow.passes.analysis.memory.objects import Period, Phase, exact_seconds
    from rlflow.passes.analysis.residents import residents_of

    phases: list[Phase] = []
    arrivals = _arrivals(flow, pool, stages)
    for stage in stages:
        before, after = arrivals.get((stage.node.id, True)), arrivals.get((stage.node.id, False))
        phases += [Phase(before[0].phase, before[1], overlap=False)] if before else []
        phases.append(Phase(stage.node.id, exact_seconds(stage.cost.seconds)))
        phases += [Phase(after[0].phase, after[1], overlap=False)] if after else []
    residents = residents_of(flow, stages, [arrival for arrival, _ in arrivals.values()])
    saving = {r.overwritten_in: Fraction(r.bytes, device.d2h) for r in residents if r.overwritten_in}
    phases = [replace(phase, seconds=phase.seconds + saving.get(phase.name, 0)) for phase in phases]
    return residents, Period(tuple(phases))


def _arrivals(flow: Flow, pool: PoolSpec, stages: list[Placed]) -> dict[tuple[str, bool], tuple[Arrival, Fraction]]:
    """Where weights are resharded: (stage, before it?) to the arrival and its seconds.

    A pool receives before the first stage that reads a copy; a pool that trains for others sends after the training.
    """
    from rlflow.passes.analysis.residents import Arrival

    found: dict[tuple[str, bool], tuple[Arrival, Fraction]] = {}
    for reshard in flow.decided(Reshard):
        seconds = Fraction(reshard.us, 1_000_000)
        size = reshard.bucket_bytes
        if not reshard.in_place:  # buckets are never fuller than what passes through them
            size = min(size, max(reshard.busiest, reshard.sent))
        here = reshard.target == pool.name
        if here:
            first = next((stage for stage in stages if stage.node.id in reshard.readers), None)
            if first is not None:
                sends = reshard.source == pool.name
                receives = frozenset(reshard.readers)
                name = f"reshard {reshard.id}"
                how = {"adapters": reshard.adapters, "in_place": reshard.in_place}
                arrival = Arrival(name, reshard.model, size, sends, receives, **how)
                found.setdefault((first.node.id, True), (arrival, seconds))
        elif reshard.source == pool.name:
            arrival = Arrival(f"publish {reshard.model}", reshard.model, size, True)
            found.setdefault((reshard.trainer, False), (arrival, seconds))
    return found


def _fit_caches(
    residents: list[Resident], period: Period, stages: list[Placed], device: Device, swapping: bool
) -> list[Resident]:
    """With the caches of generate stages cut to the room that is left for them.

    A cache is as large as the batch can use. Where that does not fit, it gets what is left beside the objects that its
    stage needs (beside everything, without swaps), and at least one longest sequence.
    """
    from rlflow.passes.analysis.residents import keys_and_values

    sizes = {resident.name: resident.bytes for resident in residents}
    if sum(sizes.values()) <= device.hbm_bytes:
        return residents
    found = list(residents)
    for stage in stages:
        if not isinstance(stage.node.op, Generate):
            continue
        name = keys_and_values(stage.node)
        beside = sum(r.bytes for r in residents if r.name != name and (stage.node.id in r.needed or not swapping))
        least = stage.least_cache
        room = max(least, min(sizes[name], device.hbm_bytes - beside))
        found = [replace(r, bytes=room) if r.name == name else r for r in found]
    return found


def _report(
    flow: Flow,
    pool: PoolSpec,
    found: Infeasible,
    device: Device,
    swapping: bool,
    context: PassContext,
    note: str | None,
) -> None:
    """One error: the stage, both numbers, the largest objects, and what would help."""
    span = _span(flow, found.phase)
    amount = gib if found.needed_bytes >= GIB else size  # pools of CPUs for a test may have a few MiB
    listed = ", ".join(f"{name} {amount(held)}" for name, held in found.holders[:5])
    more = len(found.holders) - 5
    where = f"a device of pool `{pool.name}`"
    subject = f"`{found.phase}` needs {amount(found.needed_bytes)} on {where}, which has {amount(found.capacity_bytes)}"
    if found.resource == "host":
        subject = (
            f"swapping for pool `{pool.name}` needs {amount(found.needed_bytes)} of host memory for each device, and "
            f"there are {amount(found.capacity_bytes)}"
        )
    notes = [
        f"{'at once' if swapping else 'all the time, since swapping is off'}: {listed}"
        + (f" and {more} more" if more > 0 else "")
    ]
    if found.resource == "host" and not device.host_bytes:
        notes.append("how fast a device reaches its host's memory is not known")
    notes += [note] if note else []
    fixes = _fixes(flow, found.phase, context)
    if not swapping:
        fixes.insert(0, f"`swap = true` on pool `{pool.name}`")
    context.error("RLF2004", subject, span, notes=tuple(notes), help=tuple(fixes))


def _fixes(flow: Flow, phase: str, context: PassContext) -> list[str]:
    """Settings that shrink what the stage needs, the likeliest first."""
    node = flow.nodes.get(phase)
    layout = None if node is None or node.placement is None else node.placement.layout
    if node is None or layout is None:
        return ["a larger `tp` or `pp`, or more devices"]
    fixes = []
    if node.op.kind == "train":
        if layout.recompute != "full":
            fixes.append("`recompute = full`")
        if layout.zero < 3 and layout.dp * layout.cp > 1:
            fixes.append(f"`zero = {layout.zero + 1}`")
    model = reads_model(node.op)
    shape = None if model is None else context.shapes.get(model)
    if shape is not None and layout.ep < min(shape.experts, layout.dp * layout.cp * layout.tp // layout.etp):
        fixes.append(f"a larger `ep` than {layout.ep} (fewer experts on a device)")
    fixes.append(f"a larger `tp` or `pp` than {layout.tp} and {layout.pp}, or more devices")
    return [" or ".join(fixes)]


def _decisions(
    flow: Flow,
    pool: PoolSpec,
    found: SwapPlan,
    residents: list[Resident],
    period: Period,
    device: Device,
    costs: Costs,
    context: PassContext,
) -> list[Decision]:
    from rlflow.passes.analysis.cpu_memory import machine_of
    from rlflow.passes.analysis.residents import is_transient

    machine = machine_of(pool, costs, context)
    assert machine is not None
    names = {resident.name: resident for resident in residents}
    standing = sum(resident.bytes for resident in residents if not is_transient(resident))
    phases = []
    for phase in period.phases:
        stretch = found.timeline.phase(phase.name)
        # What only computes with a stage is gone when that ends, whether or not its room is needed.
        contents = tuple(
            (name, size)
            for name, size in stretch.peak.contents
            if phase.name in names[name].needed or not is_transient(names[name])
        )
        phases.append(
            MemoryPhase(
                stage=phase.name,
                us=whole_us(stretch.end - stretch.start),
                bytes=sum(size for _, size in contents),
                contents=contents,
                host_bytes=stretch.host_bytes,
            )
        )
    most = max(sum(r.bytes for r in residents if is_transient(r) and phase.name in r.needed) for phase in period.phases)
    memory = Memory(
        pool=pool.name,
        capacity=device.hbm_bytes,
        reserved=machine.memory_bytes - device.hbm_bytes,
        host_capacity=0 if device.host_bytes == UNKNOWN_HOST_BYTES else device.host_bytes,
        peak=max(phase.bytes for phase in phases),
        peak_without_swaps=standing + most,
        phases=tuple(phases),
        span=pool.span,
    )
    swaps: list[Decision] = []
    for instruction in found.instructions:
        assert instruction.boundary is not None
        if is_transient(names[instruction.resident]):
            continue
        if instruction.action.value == "rebuild" and instruction.boundary.startswith("reshard "):
            continue  # the reshard itself writes it
        if instruction.by_phase:
            continue
        swaps.append(
            Swap(
                pool=pool.name,
                action=instruction.action.value,
                object=instruction.resident,
                bytes=instruction.bytes,
                before=instruction.boundary,
                us=whole_us(instruction.seconds),
                exposed_us=whole_us(instruction.exposed_seconds),
                span=_span(flow, instruction.boundary),
            )
        )
    for resident in residents:
        if resident.overwritten_in:
            us = whole_us(Fraction(resident.bytes, device.d2h))
            swaps.append(
                Swap(
                    pool=pool.name,
                    action="save",
                    object=resident.name,
                    bytes=resident.bytes,
                    before=resident.overwritten_in,
                    us=us,
                    exposed_us=us,
                    span=_span(flow, resident.overwritten_in),
                )
            )
    return [memory, *swaps]


def _span(flow: Flow, phase: str) -> Span | None:
    """The place of a stage, or of the training whose weights are sent or laid out anew."""
    if phase in flow.nodes:
        return flow.nodes[phase].span
    model = phase.split(" ", 1)[1]
    return next((reshard.span for reshard in flow.decided(Reshard) if model in (reshard.id, reshard.model)), None)
