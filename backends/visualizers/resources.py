"""Time, memory and traffic of a plan in words and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rlflow.amounts import gib, seconds, size
from rlflow.plan import MoveObject, Plan
from rlflow.plan_decisions import MemoryPhase, PoolMemory

Line = tuple[Literal["title", "head", "plain", "inserted", "quiet"], str]

_OBJECTS_SHOWN = 3


def glance_lines(plan: Plan, short: bool = False) -> list[Line]:
    """The period of a step and the cycle that sets it, the fullest device of every pool, and the bytes that move.

    Not `short`: also slack, and what would make a step shorter.
    """
    cadence = cadence_lines(plan)
    return [*(cadence[:2] if short else cadence), *_fullest(plan), *_moved(plan)]


def cadence_lines(plan: Plan) -> list[Line]:
    """The period of a step, the cycle that sets it, and what would make it shorter; what is missing to know it."""
    found = plan.cadence
    if found is None:
        known = {estimate.stage for estimate in plan.estimates}
        missing = [stage.id for stage in plan.stages if stage.layout is not None and stage.id not in known]
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        why = f": of {names} there is no estimate; `rlflow profile` measures them" if missing else ""
        return [("head", "time, memory and traffic"), ("plain", f"  the period of a step is not known{why}")]
    cycle = " -> ".join(f"{name} {seconds(us)}" for name, us in zip(found.cycle, found.cycle_us, strict=True) if us)
    over = f", over {found.tokens} tokens" if found.tokens > 1 else ""
    lines: list[Line] = [
        ("head", _source_of_times(plan)),
        ("plain", f"  a step every {seconds(found.us)}; bottleneck: {cycle}{over}"),
    ]
    spare = [f"{name} {seconds(us)}" for name, us in found.slack if us * 100 > found.us]
    if spare:
        lines.append(("plain", f"  slack: {', '.join(spare)}"))
    shorter = [f"one more token on {edge}: {seconds(us)}" for edge, us in found.one_more_token]
    shorter += [f"{name} in no time: {seconds(us)}" for name, us in found.without[:2]]
    shorter += [
        f"staleness {steps} of {model} is the most that shortens a step" for model, steps in found.useful_staleness
    ]
    if shorter:
        lines.append(("plain", f"  what would change it: {'; '.join(shorter)}"))
    return lines


def _fullest(plan: Plan) -> list[Line]:
    peaks = [
        f"{memory.pool} {gib(memory.peak)} of {gib(memory.capacity)} ({memory.peak / memory.capacity:.0%})"
        for memory in plan.memory
    ]
    return [("plain", f"  memory of a device at its fullest: {', '.join(peaks) or 'not known'}")]


def _moved(plan: Plan) -> list[Line]:
    """What crosses links every step: weights between layouts, and objects to the host and back."""
    parts = [
        f"weights of {found.model} {found.source}->{found.target} {size(found.received)} in {seconds(found.us)}"
        for found in plan.reshards
    ]
    for program in plan.programs:
        moves = [i for i in program.step if isinstance(i, MoveObject) and i.us]
        if moves:
            total, exposed = sum(move.bytes for move in moves), sum(move.exposed_us for move in moves)
            parts.append(
                f"{size(total)} between a device of {program.pool} and its host, {seconds(exposed)} not hidden"
            )
    if not parts:
        return [("plain", "  moved every step: no weights")] if plan.channels else []
    return [("plain", f"  moved every step: {'; '.join(parts)}")]


def _source_of_times(plan: Plan) -> str:
    if plan.profile is None:
        return "time, by the cost model"
    scaled = [e.stage for e in plan.estimates if e.measured not in ("", "measured")]
    computed = [e.stage for e in plan.estimates if not e.measured]
    words = f"time, measured by profile {plan.profile.path}"
    words += f"; scaled to other sizes: {', '.join(scaled)}" if scaled else ""
    return words + (f"; by the cost model: {', '.join(computed)}" if computed else "")


def reshard_lines(plan: Plan) -> list[Line]:
    """What every reshard moves, against the least that is possible."""
    lines: list[Line] = [("head", "reshards")] if plan.reshards else []
    for found in plan.reshards:
        how = "all-to-all of experts" if found.all_to_all else f"{found.rounds} rounds"
        how += f", {_split_words(found.split)}" if found.split else ""
        how += ", in place" if found.in_place else ""
        lines.append(
            (
                "plain",
                f"  {found.model}{' adapters' if found.adapters else ''} {found.source}->{found.target}: "
                f"{size(found.received)} received (redundancy "
                f"{found.redundancy:.0%}), {size(found.local)} kept; busiest device "
                f"{size(found.busiest)}, buckets {size(found.bucket_bytes)}, {how}; {seconds(found.us)}, links allow "
                f"{seconds(found.bound_us)}",
            )
        )
    return lines


def _split_words(split: Sequence[tuple[str, int]]) -> str:
    """The tensor that is cut into the most pieces to fit into a bucket, and how many others there are."""
    name, pieces = max(split, key=lambda part: part[1])
    others = f" and {len(split) - 1} more" if len(split) > 1 else ""
    return f"{name} in {pieces} pieces{others}"


def memory_lines(plan: Plan, most: int | None = None) -> list[Line]:
    """A table: for every stage the fullest moment of one device, and the largest objects in it.

    Of every pool the `most` fullest stages, and those that generate, whose cache is what memory leaves them.
    """
    lines: list[Line] = []
    for memory in plan.memory:
        fullest = sorted(memory.phases, key=lambda phase: -phase.bytes)[:most]
        shown = [phase for phase in memory.phases if phase in fullest or _cache(phase) in dict(phase.contents)]
        lines.append(("head", f"memory of a device of {memory.pool}: {_memory_words(memory)}"))
        rows = [
            [phase.stage, size(phase.bytes), f"{phase.bytes / memory.capacity:.0%}", _contents(phase)]
            for phase in shown
        ]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
        for row in rows:
            cells = [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3]]
            lines.append(("plain", "  " + "  ".join(cells)))
    return lines


def _memory_words(memory: PoolMemory) -> str:
    swapped = (
        f", {size(memory.peak_without_swaps)} without moving anything"
        if memory.peak != memory.peak_without_swaps
        else ""
    )
    host = max((phase.host_bytes for phase in memory.phases), default=0)
    room = size(memory.host_capacity) if memory.host_capacity else "an amount that the cluster does not state"
    on_host = f"; host {size(host)} of {room}" if host else ""
    return f"at most {size(memory.peak)} of {size(memory.capacity)}{swapped}{on_host}"


def _cache(phase: MemoryPhase) -> str:
    return f"{phase.stage} keys and values"


def _contents(phase: MemoryPhase) -> str:
    """The largest objects, and the cache of a stage that generates: it is what memory leaves it."""
    contents = phase.contents
    cache = _cache(phase)
    listed = [part for place, part in enumerate(contents) if place < _OBJECTS_SHOWN or part[0] == cache]
    shown = ", ".join(f"{name} {size(count)}" for name, count in listed)
    more = len(contents) - len(listed)
    return shown + (f", {more} more" if more > 0 else "")
