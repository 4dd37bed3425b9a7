"""All that the report says, as numbers: errors of all rows with shipped knobs, and of each source left out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import median

from benchmarks.validation.compose import step_from_published
from benchmarks.validation.fit import family_of
from benchmarks.validation.folds import fitted, sources
from benchmarks.validation.measures import median_error, whole
from benchmarks.validation.observe import Compared, Observation, compare
from benchmarks.validation.runs import Run, run, runs
from rlflow.cost.knobs import calibration

ODD = "X"
"""Grade of rows that contradict themselves or their neighbours: shown, and in no median."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows of one source with knobs that were fitted without it."""

    source: str
    fitted: bool
    """Whether the source has rows in a fit at all; otherwise every prediction of it is one of a source left out."""
    steps: tuple[Observation, ...]
    stages: tuple[Observation, ...]


@cache
def shipped() -> tuple[Compared, ...]:
    """Every row with the knobs that ship."""
    return tuple(compare(each, calibration(family_of(each))) for each in runs())


@cache
def left_out() -> tuple[LeftOut, ...]:
    """Of every source with something to compare, grades A to C."""
    found = []
    for source in dict.fromkeys(each.source for each in runs()):
        mine = [each for each in runs() if each.source == source and each.grade != ODD]
        compared = [compare(each, fitted(family_of(each), source)) for each in mine]
        steps = tuple(each.step for each in compared if each.step)
        stages = tuple(stage for each in compared for stage in each.stages)
        if steps or stages:
            known = any(source in sources(family_of(each)) for each in mine)
            found.append(LeftOut(source, known, steps, stages))
    return tuple(found)


def wholes(found: tuple[Compared, ...]) -> tuple[Observation, ...]:
    """The time of all that a row is about, grades A to C."""
    every = (whole(each) for each in found if each.run.grade != ODD)
    return tuple(each for each in every if each)


@dataclass(frozen=True, slots=True)
class Composition:
    """The step of a row from the published times of its own stages."""

    run: Run
    published: float
    composed: float
    left_out: float
    """With the share that is in no stage taken from the other sources."""

    @property
    def error(self) -> float:
        return self.composed / self.published - 1

    @property
    def left_out_error(self) -> float:
        return self.left_out / self.published - 1


COMPLETE = ("C", "V")
"""Sources whose rows list every stage of a step; the row of S lists two."""


@cache
def compositions() -> tuple[Composition, ...]:
    bare = {family: calibration(family).override(step_residual=0.0) for family in ("ascend", "nvidia")}
    sums = {}
    for each in runs():
        total = step_from_published(each, bare[family_of(each)]) if family_of(each) in bare else None
        if total is not None and each.grade != ODD and each.source in COMPLETE:
            sums[each.id] = total
    found = []
    for name, total in sums.items():
        each = run(name)
        step = each.number("step_s") or 0.0
        composed = total / (1 - calibration(family_of(each)).knobs.step_residual)
        others = [
            1 - part / (run(i).number("step_s") or 1.0) for i, part in sums.items() if run(i).source != each.source
        ]
        found.append(Composition(each, step, composed, total / (1 - median(others))))
    return tuple(found)


def medians() -> dict[str, float | None]:
    """The numbers that are compared with aims."""
    steps = [step.error for source in left_out() for step in source.steps]
    training = [o.error for each in shipped() if each.run.source == "G" for o in each.stages]
    return {
        "megatron": max(abs(error) for error in training),
        "composition": median_error(each.error for each in compositions()),
        "composition_left_out": median_error(each.left_out_error for each in compositions()),
        "steps": median_error(each.step.error for each in shipped() if each.step and each.run.grade != ODD),
        "steps_left_out": median_error(steps),
        "wholes": median_error(each.error for each in wholes(shipped())),
        "stages": median_error(o.error for each in shipped() if each.run.grade != ODD for o in each.stages),
    }
