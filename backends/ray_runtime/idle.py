"""What a rank did in a step and what it waited for, from the events of its instructions.

Busy is the time inside instructions that work (`run`, `reshard`, moves of the memory table, `publish`, `checkpoint`, a
`take` from a data set), less what they report to have waited. Idle is the rest of the step: a `take` from another
pool's queue, a `put` into it, a `wait` for a Python function, the weights of another pool, and what no instruction
covers.
Waiting for other ranks inside a stage's collectives is not seen from outside and counts as work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.plan import Instruction, TakeRows
from rlflow.profile.events import exclusive_us

BETWEEN = "between"
"""The name of the time that no instruction covers."""

_WAITS = ("put", "wait")


@dataclass(frozen=True)
class Idle:
    """One rank's step."""

    step_us: int
    waits_us: Mapping[str, int]
    """Instruction id, or BETWEEN, to microseconds."""

    @property
    def share(self) -> float:
        """Of the step, 0 .. 1."""
        return min(1.0, sum(self.waits_us.values()) / self.step_us) if self.step_us else 0.0

    def __str__(self) -> str:
        """`28%, most of it in put:samples 0.123 s`"""
        most = max(self.waits_us, key=self.waits_us.__getitem__, default="")
        words = f"{self.share:.0%}"
        return f"{words}, most of it in {most} {self.waits_us[most] / 1e6:.3f} s" if most else words


def queue_takes(instructions: Iterable[Instruction]) -> frozenset[str]:
    """Ids of the instructions that take from another pool's queue."""
    return frozenset(i.id for i in instructions if isinstance(i, TakeRows) and i.queue)


def idle_of(events: Sequence[Mapping[str, Any]], step_us: int, takes: frozenset[str]) -> Idle:
    """`events`: what the rank recorded in the step, which took `step_us` microseconds; `takes` as `queue_takes` gives.

    Instructions that ran inside another one, as a refill runs them, count as what they are.
    """
    own = [event for event in events if event["kind"] != "call"]  # a call runs on another pool
    own.sort(key=lambda event: (event["start_us"], -event["duration_us"]))
    waits: dict[str, int] = {}
    covered = 0
    for event, us in zip(own, exclusive_us(own), strict=True):
        covered += us
        is_wait = event["kind"] in _WAITS or event["instruction"] in takes
        waited = us if is_wait else min(us, event.get("waited_us", 0))
        if is_wait or waited:
            waits[event["instruction"]] = waits.get(event["instruction"], 0) + waited
    waits[BETWEEN] = max(0, step_us - covered)
    return Idle(step_us, waits)
