"""When copies from the host begin, so that they are there when their stage starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlflow.backends.simulator.clock import Time
from rlflow.plan import Instruction, MoveObject, RunStage


@dataclass(frozen=True, slots=True)
class Start:
    """The copy of an `onload` begins, for this step's instruction or (steps = 1) for the next one's."""

    instruction: MoveObject
    steps: int


def starts_of(instructions: Sequence[Instruction], microseconds: Callable[[str], Time]) -> dict[int, list[Start]]:
    """Number of a `run` to the copies that begin with it.

    Backwards from the end: every copy runs beside the last stages before it that the link has free, in a list that
    repeats (latest start, as late jobs of earliest-deadline-first read backwards). No copy begins before its object has
    left.
    """
    count = len(instructions)
    windows: dict[int, Time] = {
        number: microseconds(instruction.stage)
        for number, instruction in enumerate(instructions)
        if isinstance(instruction, RunStage)
    }
    moves = [(n, i) for n, i in enumerate(instructions) if isinstance(i, MoveObject)]
    onloads = [(n, i) for n, i in moves if i.kind == "onload" and i.from_host and i.us > i.exposed_us]
    left = dict(windows)
    starts: dict[int, list[Start]] = {}
    # A copy that wraps around competes with those at the end of the list, which are due earlier.
    for number, move in sorted(onloads, key=lambda found: -found[0]):
        gone = max(
            (n if n < number else n - count for n, i in moves if i.object == move.object and i.kind != "onload"),
            default=number - count,
        )
        hidden: Time = move.us - move.exposed_us
        at: int | None = None
        for place in range(number - 1, gone, -1):
            free = left.get(place % count, 0)
            if free <= 0:
                continue
            at = place
            left[place % count] = free - min(free, hidden)
            hidden -= min(free, hidden)
            if hidden <= 0:
                break
        if at is not None:
            starts.setdefault(at % count, []).append(Start(move, 1 if at < 0 else 0))
    return starts
