"""The instruction list of a plan: one offload, onload, drop or rebuild per object and gap."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rlflow.passes.analysis.memory.gaps import Eviction, Gap
from rlflow.passes.analysis.memory.movement import Action, Move, Movement
from rlflow.passes.analysis.memory.objects import Period
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Instruction:
    """One action on an object in one gap.

    `boundary` is the phase it belongs to: it is given before that phase starts (drop, offload), or complete before that
    phase starts (onload, rebuild); None at the end of a line. `start` and `end` are seconds from the first phase, waits
    included; a copy that goes on into the next period ends later than the period. `seconds` is its time on the link or
    rebuilding, `exposed_seconds` the part of it that lies between phases. `moves` are its stretches in time.
    """

    action: Action
    resident: str
    owner: str
    bytes: int
    gap: str
    boundary: str | None
    seconds: Fraction
    exposed_seconds: Fraction
    start: Fraction
    end: Fraction
    tag: str
    moves: tuple[Move, ...]
    by_phase: bool = False
    """Done by the phase before it, which has written one object over another."""


ORDER = (Action.DROP, Action.OFFLOAD, Action.ONLOAD, Action.REBUILD)
"""At one boundary: what frees memory first, and copies out before copies in."""


def instructions_of(evictions: Sequence[Eviction], movement: Movement, period: Period) -> tuple[Instruction, ...]:
    """All instructions of a period by start; at one instant drops come first, then offloads, onloads, rebuilds."""
    groups: dict[tuple[int, Action], list[Move]] = {}
    for move in movement.moves:
        groups.setdefault((move.eviction, move.action), []).append(move)
    length = movement.slots[-1].end
    found = []
    for (number, action), moves in groups.items():
        gap = evictions[number].gap
        times = [_times(move, gap, period, length, moves) for move in moves]
        ordered = [move for _, move in sorted(zip(times, moves, strict=True), key=lambda pair: pair[0])]
        found.append(
            Instruction(
                action,
                gap.resident.name,
                gap.resident.owner,
                sum(move.bytes for move in moves),
                gap.label(period),
                _boundary(action, gap, period),
                sum((move.seconds for move in moves), Fraction(0)),
                sum((move.seconds for move in moves if move.exposed), Fraction(0)),
                min(start for start, _ in times),
                max(end for _, end in times),
                gap.resident.tag,
                tuple(ordered),
                by_phase=(gap.overwritten and action is Action.DROP) or (gap.taken_over and action is Action.REBUILD),
            )
        )
    return tuple(sorted(found, key=lambda i: (i.start, ORDER.index(i.action), i.end)))


def _times(move: Move, gap: Gap, period: Period, length: Fraction, moves: Sequence[Move]) -> tuple[Fraction, Fraction]:
    """Start and end; the part after the wrap counts on where the same instruction began before it."""
    late_from = 2 * (gap.first or len(period.phases))
    wraps = move.slot < late_from and any(other.slot >= late_from for other in moves)
    shift = length if wraps else Fraction(0)
    return move.start + shift, move.end + shift


def _boundary(action: Action, gap: Gap, period: Period) -> str | None:
    if action in (Action.DROP, Action.OFFLOAD):
        return period.phases[gap.first].name
    following = gap.last + 1
    if following == len(period.phases) and not period.cyclic:
        return None
    return period.phases[following % len(period.phases)].name
