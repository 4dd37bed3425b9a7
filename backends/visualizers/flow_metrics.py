"""What metrics say about the flow of work: verl's names, and rlflow's for pools, queues and ages.

`pool/<pool>/idle` is the share of a step (0..1) in which a pool does nothing; `queue/<queue>/depth` batches that wait;
`age/<stage>/mean` and `age/<stage>/max` how old the samples of a step were, in steps, and `age/<stage>/count/<age>` how
many had that age. `pool/<pool>/wait_s/<instruction>` says in what a pool waited. A run records what it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

REWARD = ("critic/score/mean", "critic/rewards/mean")

_NOT_STAGES = frozenset({"step"})


def is_step(data: Mapping[str, object]) -> bool:
    """Whether the row is of a training step, not of an evaluation."""
    return "training/global_step" in data or any(name in data for name in (*REWARD, "timing_s/step"))


def numbers(data: Mapping[str, object]) -> dict[str, float]:
    """The values that are numbers, infinite ones and NaN too: of a run that diverged they are what one must see."""
    return {n: float(v) for n, v in data.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def number(value: object) -> float | None:
    """The value where it is a finite number."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def reward_of(data: Mapping[str, object]) -> float | None:
    """The mean reward of a step, also where it is NaN."""
    found = numbers(data)
    return next((found[name] for name in REWARD if name in found), None)


def stage_seconds(data: Mapping[str, object]) -> list[tuple[str, float]]:
    """Seconds per stage, in the order given; the whole step is not a stage."""
    found = _below(data, "timing_s/")
    return [(name, value) for name, value in found if name not in _NOT_STAGES]


def held_out(data: Mapping[str, object]) -> dict[str, float]:
    """Name of each evaluation to its mean: the keys `val/<name>/mean`."""
    return {name.removesuffix("/mean"): value for name, value in _below(data, "val/") if name.endswith("/mean")}


def idle_shares(data: Mapping[str, object]) -> list[tuple[str, float]]:
    """Pool and its idle share; where no pool reports one, the share of the step in no stage, under an empty name."""
    found = _between(data, "pool/", "/idle")
    step, stages = number(data.get("timing_s/step")), stage_seconds(data)
    if found or not step or not stages:
        return found
    return [("", max(0.0, 1 - sum(value for _, value in stages) / step))]


def longest_waits(data: Mapping[str, object]) -> dict[str, str]:
    """Pool to the instruction in which it waited longest, of the metrics `pool/<pool>/wait_s/<instruction>`."""
    found: dict[str, tuple[float, str]] = {}
    for name, seconds in _below(data, "pool/"):
        pool, mark, instruction = name.partition("/wait_s/")
        if mark and seconds > 0:
            found[pool] = max(found.get(pool, (0.0, "")), (seconds, instruction))
    return {pool: instruction for pool, (_, instruction) in found.items()}


def queue_depths(data: Mapping[str, object]) -> list[tuple[str, float]]:
    """Queue and the batches in it."""
    return _between(data, "queue/", "/depth")


def ages(data: Mapping[str, object]) -> list[tuple[str, float | None, float | None]]:
    """Stage, mean age and greatest age of its samples in steps; None where one is not recorded."""
    means, most = dict(_between(data, "age/", "/mean")), dict(_between(data, "age/", "/max"))
    return [(name, means.get(name), most.get(name)) for name in dict.fromkeys([*means, *most])]


def _below(data: Mapping[str, object], prefix: str) -> list[tuple[str, float]]:
    pairs = ((name.removeprefix(prefix), number(value)) for name, value in data.items() if name.startswith(prefix))
    return [(name, value) for name, value in pairs if value is not None]


def _between(data: Mapping[str, object], prefix: str, suffix: str) -> list[tuple[str, float]]:
    return [(name.removesuffix(suffix), value) for name, value in _below(data, prefix) if name.endswith(suffix)]
