"""Batches in queues and ages of samples over time, as a simulation found them and as the events of a run tell."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from rlflow.backends.visualizers.report.subject import Event, Simulated
from rlflow.backends.visualizers.report.timeline import Labels
from rlflow.plan import Plan, PutRows, TakeRows


def simulated_queues(plan: Plan, simulated: Simulated) -> list[dict[str, Any]]:
    """(time, batches from then on): from the start of the stage that makes a batch to the end of its last reader."""
    return [
        _queue(queue.id, queue.capacity, "simulated", [(round(t), d) for t, d in simulated.depths[queue.id]])
        for queue in plan.queues
        if queue.id in simulated.depths
    ]


def simulated_ages(simulated: Simulated) -> list[dict[str, Any]]:
    """Step (from 1) to (age, samples)."""
    return [
        _ages(stage, "simulated", simulated.promised.get(stage), {step + 1: ages for step, ages in by_step.items()})
        for stage, by_step in simulated.ages.items()
    ]


def measured_queues(plan: Plan, events: Sequence[Event], first_us: float) -> list[dict[str, Any]]:
    """The same of a run, whose queues record only what ranks do: a batch is in from the moment at which the last rank
    has put its part to the moment at which the last rank has taken its own. Times are since `first_us`."""
    puts: dict[tuple[str, str], str] = {}
    takes: dict[tuple[str, str], str] = {}
    for program in plan.programs:
        for i in program.step:
            if isinstance(i, PutRows):
                puts[program.pool, i.id] = i.queue
            elif isinstance(i, TakeRows) and i.queue:
                takes[program.pool, i.id] = i.queue
    found = []
    for queue in plan.queues:
        changes: list[tuple[float, int]] = []
        for instructions, change in ((puts, 1), (takes, -1)):
            ends: dict[int, float] = defaultdict(float)
            for event in events:
                if instructions.get((event["pool"], event["instruction"])) == queue.id:
                    ends[event["step"]] = max(ends[event["step"]], event["start_us"] + event["duration_us"])
            changes += [(end - first_us, change) for end in ends.values()]
        points, depth = [(0, 0)], 0
        for time, change in sorted(changes, key=lambda entry: (entry[0], -entry[1])):
            depth += change
            points.append((round(time), depth))
        if len(points) > 1 and min(depth for _, depth in points) >= 0:  # a run that was cut off tells takes alone
            found.append(_queue(queue.id, queue.capacity, "measured", points))
    return found


def measured_ages(plan: Plan, events: Sequence[Event], labels: Labels) -> list[dict[str, Any]]:
    """Step to (age, ranks that generated with weights of that age)."""
    found: dict[str, dict[int, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
    for event in events:
        age = labels.age(event)
        if age >= 0:
            found[event["stage"]][int(event["step"])][age] += 1
    promised = {reader.stage: reader.worst_age for channel in plan.channels for reader in channel.stale}
    return [_ages(stage, "measured", promised.get(stage, 0), by_step) for stage, by_step in found.items()]


def _queue(id: str, capacity: int, track: str, points: Sequence[tuple[int, int]]) -> dict[str, Any]:
    return {"id": id, "capacity": capacity, "track": track, "points": points}


def _ages(stage: str, track: str, promised: int | None, by_step: Any) -> dict[str, Any]:
    steps = [[step, sorted(ages.items())] for step, ages in sorted(by_step.items())]
    return {"stage": stage, "track": track, "promised": promised, "steps": steps}
