"""Chrome traces of plans and runs: what was planned, what was measured, and both in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.diagnostics import RunFailure
from rlflow.runs import read_events

if TYPE_CHECKING:
    from rlflow.plan import Plan

Event = Mapping[str, Any]

PLANNED_STEPS = 20
"""Of a plan that was not run."""


@dataclass(frozen=True)
class Sides:
    """The events of a trace. Times in microseconds, each side from a start of its own."""

    plan: Plan
    planned: tuple[Event, ...]
    """By the simulator; empty where the plan does not know its times."""
    measured: tuple[Event, ...]
    """Empty for a plan that was not run."""
    not_planned: str = ""
    """Why `planned` is empty."""

    def write(self, path: Path) -> None:
        """One process a pool where there is one side, two processes `planned` and `measured` where there are both.
        OSError from the disk."""
        from rlflow.backends.visualizers.trace import write_overlay, write_trace

        if self.planned and self.measured:
            write_overlay(path, self.planned, self.measured, self.plan)
        else:
            write_trace(path, self.planned or self.measured, self.plan)


def planned_events(plan: Plan, steps: int, stated: Mapping[str, float] | None = None) -> tuple[Event, ...]:
    """The events of the first `steps` steps, by the simulator; one rank stands for its pool.

    Raises RunFailure RLF4004 where the time of a stage is neither estimated nor in `stated` (seconds).
    """
    from rlflow.backends.simulator.run import Options, simulate

    found = simulate(plan, Options(steps=steps, warm_up=0, stated=stated or {}))
    return tuple(event for event in found.events if event["step"] <= steps)


def trace_of_plan(plan: Plan, steps: int = PLANNED_STEPS, stated: Mapping[str, float] | None = None) -> Sides:
    """What a plan does, without a run. Raises RunFailure RLF4004."""
    return Sides(plan, planned_events(plan, steps, stated), ())


def trace_of_run(
    run_dir: Path,
    plan: Plan,
    steps: int | None = None,
    stated: Mapping[str, float] | None = None,
    *,
    must_plan: bool = False,
) -> Sides:
    """What a run did beside what `plan` expects of the same steps; `steps`: only the first so many.

    Where the plan does not know its times there is only what was measured, or RunFailure RLF4004 with `must_plan`.
    """
    measured = _from_zero([event for event in read_events(run_dir) if steps is None or event["step"] <= steps])
    trained = _training_steps(plan, measured)
    if not trained:
        return Sides(plan, (), measured, "no training step has been recorded")
    try:
        planned = planned_events(plan, max(trained), stated)
    except RunFailure as failure:
        if must_plan or failure.code != "RLF4004":
            raise
        return Sides(plan, (), measured, failure.message)
    return Sides(plan, tuple(event for event in planned if event["step"] >= min(trained)), measured)


def _from_zero(events: Sequence[dict[str, Any]]) -> tuple[Event, ...]:
    """The events with the first at 0 instead of at seconds since the epoch."""
    first = min((event["start_us"] for event in events), default=0)
    return tuple({**event, "start_us": event["start_us"] - first} for event in events)


def _training_steps(plan: Plan, events: Sequence[Event]) -> set[int]:
    """Steps of which an instruction ran that is not an evaluation's."""
    own = {i.id for program in plan.programs for i in program.step}
    return {int(event["step"]) for event in events if event["instruction"] in own}
