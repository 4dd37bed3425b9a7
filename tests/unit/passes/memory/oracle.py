"""Independent oracles: exhaustive search over pages, and a replay of the instructions. They share no code with what they
check beyond the value classes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from hypothesis import assume
from hypothesis import strategies as st

from rlflow.passes.analysis.memory.movement import Action
from rlflow.passes.analysis.memory.objects import Device, Kind, Period, Phase, Resident
from rlflow.passes.analysis.memory.swap import SwapPlan

Case = tuple[list[Resident], Period, Device]


@st.composite
def cases(draw: st.DrawFn, cyclic: bool | None = None, most_choices: int = 2000) -> Case:
    """Small problems: a few objects of a few pages, tails among them, tight memory, links slower than the phases."""
    size = draw(st.integers(1, 5))
    phases = tuple(
        Phase(f"p{i}", Fraction(draw(st.sampled_from([0, 1, 2, 3, 7, 20]))), draw(st.integers(0, 6)) > 0)
        for i in range(size)
    )
    period = Period(phases, draw(st.booleans()) if cyclic is None else cyclic)
    residents = []
    for i in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(Kind))
        page = draw(st.sampled_from([1, 1, 2, 3, 5]))
        residents.append(
            Resident(
                f"r{i}",
                "owner",
                draw(st.integers(0, 3)) * page + draw(st.integers(0, page - 1)),
                frozenset(phase.name for phase in phases if draw(st.integers(0, 2)) == 0),
                kind,
                Fraction(draw(st.integers(0, 4))) if kind is Kind.DROPPABLE else Fraction(0),
                kind is Kind.CLEAN and draw(st.booleans()),
                page,
            )
        )
    choices = 1
    for resident in residents:
        choices *= (2 ** len(runs(resident, period))) ** len(page_sizes(resident))
    assume(choices <= most_choices)
    total = sum(resident.bytes for resident in residents)
    least = max(sum(r.bytes for r in residents if phase.name in r.needed) for phase in phases)
    device = Device(
        draw(st.integers(max(0, least - 1), max(total, least))),
        draw(st.one_of(st.just(1000), st.integers(0, total + 1))),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
    )
    return residents, period, device


def runs(resident: Resident, period: Period) -> list[list[int]]:
    """Maximal runs of phases without a use, found by growing from every phase both ways."""
    names = [phase.name for phase in period.phases]
    size = len(names)
    idle = {i for i in range(size) if names[i] not in resident.needed}
    if not resident.bytes:
        return []
    if period.cyclic and len(idle) == size:
        return [list(range(size))]
    found = []
    for start in range(size):
        before = start - 1 if start else (size - 1 if period.cyclic else None)
        if start in idle and before not in idle:
            run, at = [], start
            while at in idle and at not in run:
                run.append(at)
                at = at + 1
                if at == size:
                    if not period.cyclic:
                        break
                    at = 0
            found.append(run)
    return found


def page_sizes(resident: Resident) -> list[int]:
    sizes = []
    left = resident.bytes
    while left > 0:
        sizes.append(min(left, resident.page_bytes))
        left -= sizes[-1]
    return sizes


def page_cost(resident: Resident, period: Period, device: Device, size: int, absent: list[bool]) -> Fraction:
    """Seconds per period of one page that is absent in the marked runs."""
    all_runs = runs(resident, period)
    last = len(period.phases) - 1
    never_needed = period.cyclic and not resident.needed
    total = Fraction(0)
    on_host = resident.host_copy
    for run, gone in zip(all_runs, absent, strict=True):
        if not gone or never_needed:
            continue
        leaves = period.cyclic or run[0] > 0
        returns = period.cyclic or run[-1] < last
        if resident.kind is Kind.DIRTY and leaves:
            total += Fraction(size, device.d2h)
        if resident.kind is Kind.CLEAN and leaves and not period.cyclic and not on_host:
            total += Fraction(size, device.d2h)
        on_host = True
        if returns:
            if resident.kind is Kind.DROPPABLE:
                total += resident.rebuild_seconds * Fraction(size, resident.bytes)
            else:
                total += Fraction(size, device.h2d)
    return total


def cheapest(residents: list[Resident], period: Period, device: Device) -> Fraction | None:
    """The least seconds over all choices of absent runs for every single page; None if no choice fits."""
    size = len(period.phases)
    pages = [(r, s, runs(r, period)) for r in residents for s in page_sizes(r)]
    spans = size if period.cyclic else size + 1
    best = None
    for choice in product(*(list(product((False, True), repeat=len(all_runs))) for _, _, all_runs in pages)):
        on_device = [sum(r.bytes for r in residents)] * size
        on_host = [sum(r.bytes for r in residents if r.host_copy)] * spans
        total = Fraction(0)
        for (resident, bytes_, all_runs), absent in zip(pages, choice, strict=True):
            touched = set()
            for run, gone in zip(all_runs, absent, strict=True):
                if gone:
                    for phase in run:
                        on_device[phase] -= bytes_
                        touched |= {phase, (phase + 1) % size if period.cyclic else phase + 1}
            if resident.kind is Kind.DIRTY:
                for boundary in touched:
                    on_host[boundary] += bytes_
            if resident.kind is Kind.CLEAN and not resident.host_copy and any(absent):
                on_host = [held + bytes_ for held in on_host]
            total += page_cost(resident, period, device, bytes_, list(absent))
        if max(on_device) <= device.hbm_bytes and max(on_host) <= device.host_bytes and (best is None or total < best):
            best = total
    return best


def replay(plan: SwapPlan, residents: list[Resident], period: Period, device: Device) -> None:
    """Run the instructions of three periods page by page; raise AssertionError where the plan breaks a rule of memory or link."""
    by_name = {resident.name: resident for resident in residents}
    length = plan.movement.slots[-1].end
    nominal = sum(phase.seconds for phase in period.phases)
    assert length == nominal + plan.exposed_seconds
    at = Fraction(0)
    for slot in plan.movement.slots:  # slots tile the period; phases have their own length
        assert slot.start == at
        at = slot.end
        if slot.number % 2:
            assert slot.end - slot.start == period.phases[slot.number // 2].seconds

    assert sorted(map(repr, plan.movement.moves)) == sorted(repr(m) for i in plan.instructions for m in i.moves)
    for instruction in plan.instructions:
        assert instruction.bytes == sum(move.bytes for move in instruction.moves)
        assert instruction.start <= instruction.end <= instruction.start + length
        assert instruction.start < length or (instruction.start == length and instruction.seconds == 0)
    events = []
    for turn in range(3 if period.cyclic else 1):
        busy: dict[Action, Fraction] = {}
        for move in sorted((m for i in plan.instructions for m in i.moves), key=lambda m: m.start):
            resident = by_name[plan.evictions[move.eviction].gap.resident.name]
            where = next(s for s in plan.movement.slots if s.number == move.slot)
            assert where.start <= move.start <= move.end <= where.end
            if move.exposed is False:
                assert move.start == move.end or period.phases[move.slot // 2].overlap
            pooled = 1 if resident.kind is Kind.DIRTY else 0
            rate = {Action.OFFLOAD: device.d2h, Action.ONLOAD: device.h2d}.get(move.action)
            if rate is None:
                sign = -1 if move.action is Action.DROP else 1
                events.append(Event(turn, move.slot, move.start, sign * move.bytes, 0, resident.name))
                continue
            assert move.end - move.start == Fraction(move.bytes, rate)
            assert move.start >= busy.get(move.action, Fraction(0)), "one copy at a time in each direction"
            busy[move.action] = move.end
            assert move.bytes % move.page_bytes == 0
            each = Fraction(move.page_bytes, rate)
            for page in range(move.bytes // move.page_bytes):
                first, size = move.start + page * each, move.page_bytes
                if move.action is Action.OFFLOAD:
                    events.append(Event(turn, move.slot, first, 0, pooled * size, resident.name))
                    events.append(Event(turn, move.slot, first + each, -size, 0, resident.name))
                else:
                    events.append(Event(turn, move.slot, first, size, 0, resident.name))
                    events.append(Event(turn, move.slot, first + each, 0, -pooled * size, resident.name))
    events.sort()

    # Before the first event: what makes every object complete when a phase that needs it starts.
    held, pool = {}, 0
    for name, resident in by_name.items():
        mine = [e for e in plan.evictions if e.gap.resident.name == name]
        first = next((i for i, phase in enumerate(period.phases) if phase.name in resident.needed), None)
        before = (
            [] if first is None else [e for e in events if e.name == name and (e.turn, e.slot) < (0, 2 * first + 1)]
        )
        held[name] = resident.bytes - sum(e.device for e in before)
        pool -= sum(e.host for e in before)
        if first is None:
            held[name] -= sum(e.bytes for e in mine)
            pool += sum(e.bytes for e in mine) if resident.kind is Kind.DIRTY else 0
    clean_pages = {
        (r.name, page): size
        for e in plan.evictions
        for r in [e.gap.resident]
        if r.kind is Kind.CLEAN and not r.host_copy
        for page, size in e.pages()
    }
    constant = sum(r.bytes for r in residents if r.host_copy) + sum(clean_pages.values())
    started, most = [], sum(held.values())
    assert most <= device.hbm_bytes
    assert pool + constant <= device.host_bytes
    for turn in range(3 if period.cyclic else 1):
        started += [Event(turn, s.number, Fraction(-1), 0, 0, "") for s in plan.movement.slots if s.number % 2]
    for event in sorted([*events, *started]):
        if not event.name:
            for resident in residents:
                if period.phases[event.slot // 2].name in resident.needed:
                    assert held[resident.name] == resident.bytes, f"{resident.name} is incomplete in {event}"
            continue
        held[event.name] += event.device
        pool += event.host
        most = max(most, sum(held.values()))
        assert 0 <= held[event.name] <= by_name[event.name].bytes
        assert sum(held.values()) <= device.hbm_bytes, f"{sum(held.values())} bytes at {event}"
        assert 0 <= pool <= device.host_bytes - constant, f"{pool} bytes of host memory at {event}"
    assert most == plan.timeline.peak.bytes


def replay_at_boundaries(plan: SwapPlan, residents: list[Resident], period: Period, device: Device) -> None:
    """An executor that overlaps nothing: every boundary's instructions one after the other, two periods long."""
    held = {resident.name: resident.bytes for resident in residents}
    for eviction in plan.evictions:  # what is absent in the phase before the first boundary
        gap = eviction.gap
        starts = (len(period.phases) - 1) if period.cyclic else 0
        if starts in gap.phases:
            held[gap.resident.name] -= eviction.bytes
    assert sum(held.values()) <= device.hbm_bytes
    for _ in range(2 if period.cyclic else 1):
        for number, phase in enumerate(period.phases):
            for instruction in plan.before(phase.name) if number or period.cyclic else ():
                out = instruction.action in (Action.DROP, Action.OFFLOAD)
                # Pages that have a host copy already are dropped, the others offloaded: both leave the device.
                held[instruction.resident] += -instruction.bytes if out else instruction.bytes
                assert sum(held.values()) <= device.hbm_bytes
            for resident in residents:
                assert 0 <= held[resident.name] <= resident.bytes
                if phase.name in resident.needed:
                    assert held[resident.name] == resident.bytes, f"{resident.name} is incomplete in {phase.name}"


@dataclass(frozen=True, order=True)
class Event:
    """A page that leaves or comes, on the device or on the host; what leaves sorts first."""

    turn: int
    slot: int
    at: Fraction
    device: int
    host: int
    name: str
