"""What to evict in which gap, at least cost: the interval program of one period, or why nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

from rlflow.passes.analysis.memory.gaps import Eviction, Gap, all_gaps, whole_gap
from rlflow.passes.analysis.memory.greedy import solve_greedily
from rlflow.passes.analysis.memory.host import host_by_boundary, kept_copies, standing_copies
from rlflow.passes.analysis.memory.objects import Device, Kind, Period, Resident
from rlflow.passes.analysis.memory.program import (
    Column,
    Program,
    RowKind,
    boundary_sides,
    build,
    host_holds_all,
    overflow,
)
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """Evictions, and the least seconds of link and rebuilding that any choice needs."""

    evictions: tuple[Eviction, ...]
    bound_seconds: float


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No plan exists. `resource` is `device` or `host`; `phase` the one where most is missing; `holders` what must be
    there at once, largest first. With `device` these are the objects that the phase needs: nothing can be evicted."""

    resource: str
    phase: str
    missing_bytes: int
    capacity_bytes: int
    holders: tuple[tuple[str, int], ...]

    @property
    def needed_bytes(self) -> int:
        return self.capacity_bytes + self.missing_bytes


def choose(residents: Sequence[Resident], period: Period, device: Device) -> Choice | Infeasible:
    """The cheapest evictions that let every phase fit. Imports no solver where one phase decides."""
    too_much = _needed_at_once(residents, period, device)
    if too_much is not None:
        return too_much
    host_left = device.host_bytes - standing_copies(residents)
    forced = any(resident.overwritten_in or resident.written_in for resident in residents)
    if max(overflow(residents, period, device)) <= 0 and not forced:
        return Choice((), 0.0) if host_left >= 0 else _standing_too_much(residents, period, device)

    gaps = all_gaps(residents, period)
    roomy = host_holds_all(gaps, host_left)
    free = tuple(whole_gap(gap) for gap in gaps if _free(gap, roomy, device))
    paid = [gap for gap in gaps if not _free(gap, roomy, device)]
    over = overflow(residents, period, device, free)
    spent = float(cost(free, device))
    if max(over) <= 0 and (roomy or not forced):
        return Choice(free, spent) if host_left >= 0 else _standing_too_much(residents, period, device)

    program = build(paid, over, host_left, period, device, free)
    solution = solve_greedily(program)
    if solution is None:
        from rlflow.passes.analysis.memory.lp import solve

        solution = solve(program)
        if solution is None:
            return _host_too_small(residents, program, gaps, free, period, device)
    return Choice(_in_order((*free, *program.evictions(solution.counts)), gaps), spent + solution.bound_seconds)


def rounded(
    amounts: Sequence[tuple[Gap, float]], residents: Sequence[Resident], period: Period, device: Device
) -> Choice | None:
    """Amounts per gap, rounded up to pages and without pages that no phase needs gone; None if the host is too small.

    The bound is 0: amounts do not say how they were found.
    """
    from rlflow.passes.analysis.memory.lp import irredundant

    gaps = all_gaps(residents, period)
    host_left = device.host_bytes - standing_copies(residents)
    roomy = host_holds_all(gaps, host_left)
    free = tuple(whole_gap(gap) for gap in gaps if _free(gap, roomy, device))
    paid = [gap for gap in gaps if not _free(gap, roomy, device)]
    program = build(paid, overflow(residents, period, device, free), host_left, period, device, free)
    wanted = {(gap.resident.name, gap.first): amount for gap, amount in amounts}
    counts = []
    for column in program.columns:
        if column.gap is None or column.gap.always:
            counts.append(column.limit)
            continue
        amount = wanted[column.gap.resident.name, column.gap.first] - 1e-6 * column.unit  # noise is no page
        before = column.gap.resident.full_pages * column.gap.resident.page_bytes if column.tail else 0
        counts.append(min(column.limit, max(0, ceil((amount - before) / column.unit))))
    counts = irredundant(program, counts)
    if not program.satisfied(counts):
        return None
    return Choice(_in_order((*free, *program.evictions(counts)), gaps), 0.0)


def cost(evictions: Sequence[Eviction], device: Device) -> Fraction:
    """Seconds of link and rebuilding of a choice, first host copies on a line included."""
    total = sum((e.gap.seconds(e.bytes, device) for e in evictions), Fraction(0))
    on_host: dict[str, set[int]] = {}
    for eviction in evictions:  # a resident's gaps come in the order of time
        if eviction.gap.resident.kind is Kind.CLEAN:
            seen = on_host.setdefault(eviction.gap.resident.name, set())
            for page, size in eviction.pages():
                if eviction.gap.saves_once and page not in seen:
                    total += Fraction(size, device.d2h)
                seen.add(page)
    return total


def _in_order(evictions: Sequence[Eviction], gaps: Sequence[Gap]) -> tuple[Eviction, ...]:
    order = {id(gap): number for number, gap in enumerate(gaps)}
    return tuple(sorted(evictions, key=lambda eviction: order[id(eviction.gap)]))


def _free(gap: Gap, roomy: bool, device: Device) -> bool:
    """Leaving in the gap is no choice, or costs no time and no host memory that could run out."""
    if gap.forced:
        return True
    takes_host = gap.pools_host or gap.keeps_host
    return not gap.saves_once and gap.seconds(gap.resident.bytes, device) == 0 and (roomy or not takes_host)


def _needed_at_once(residents: Sequence[Resident], period: Period, device: Device) -> Infeasible | None:
    worst: Infeasible | None = None
    for phase in period.phases:
        held = [(r.name, r.bytes) for r in residents if phase.name in r.needed]
        total = sum(size for _, size in held)
        if total > device.hbm_bytes and (worst is None or total > worst.needed_bytes):
            worst = _infeasible("device", phase.name, total, device.hbm_bytes, held)
    return worst


def _standing_too_much(residents: Sequence[Resident], period: Period, device: Device) -> Infeasible:
    held = [(r.name, r.bytes) for r in residents if r.host_copy]
    return _infeasible("host", period.phases[0].name, standing_copies(residents), device.host_bytes, held)


def _host_too_small(
    residents: Sequence[Resident],
    program: Program,
    gaps: Sequence[Gap],
    free: Sequence[Eviction],
    period: Period,
    device: Device,
) -> Choice | Infeasible:
    """The device alone would fit, so the host is short: by how much at least (to a ten-thousandth), and for what."""
    from rlflow.passes.analysis.memory.lp import solve

    short = len(program.columns)
    most = sum(c.unit * c.limit for c in program.columns) + sum(resident.bytes for resident in residents)
    # One byte at a time would be lost beside pages of millions in the solver's arithmetic.
    unit = max(1, max((c.unit for c in program.columns), default=1) // 10_000)
    columns = [replace(column, seconds=Fraction(0)) for column in program.columns]
    columns.append(Column(None, unit, most // unit + 1, Fraction(1)))
    rows = [replace(r, terms={**r.terms, short: unit}) if r.kind is RowKind.HOST else r for r in program.rows]
    found = solve(Program(tuple(columns), tuple(rows)), gap=1e-4)
    if found is None:
        raise ArithmeticError("a plan without a limit of host memory exists, but the solver finds none")
    evictions = (*free, *program.evictions(found.counts[:-1]))
    if program.satisfied(found.counts[:-1]):  # the solver refused a plan that fits to the byte
        return Choice(_in_order(evictions, gaps), 0.0)
    held = host_by_boundary(residents, evictions, period)
    boundary = max(range(len(held)), key=lambda i: (held[i], -i))
    phase = period.phases[min(boundary, len(period.phases) - 1)]
    sizes: dict[str, int] = {r.name: r.bytes for r in residents if r.host_copy}
    sizes |= kept_copies(evictions)
    for eviction in evictions:
        if eviction.gap.pools_host and boundary_sides(boundary, period) & eviction.gap.host_phases(period):
            name = eviction.gap.resident.name
            sizes[name] = sizes.get(name, 0) + eviction.bytes
    return _infeasible("host", phase.name, held[boundary], device.host_bytes, list(sizes.items()))


def _infeasible(resource: str, phase: str, total: int, capacity: int, held: Sequence[tuple[str, int]]) -> Infeasible:
    largest_first = sorted((h for h in held if h[1]), key=lambda item: (-item[1], item[0]))
    return Infeasible(resource, phase, total - capacity, capacity, tuple(largest_first))
