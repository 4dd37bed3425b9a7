"""What of a published run can be compared: predicted and published seconds, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

from benchmarks.validation.lengths import Implied, implied
from benchmarks.validation.predict import predict
from benchmarks.validation.runs import Run
from rlflow.cost.errors import CostError
from rlflow.cost.knobs import Calibration


@dataclass(frozen=True, slots=True)
class Observation:
    """A stage of a row, or its `step`."""

    run: Run
    stage: str
    predicted: float
    published: float

    @property
    def error(self) -> float:
        """Relative: -0.2 is a fifth too fast."""
        return self.predicted / self.published - 1

    @property
    def log_error(self) -> float:
        return log(self.predicted / self.published)


@dataclass(frozen=True, slots=True)
class Compared:
    """All observations of a row; `implied` where its mean length was taken from a published time."""

    run: Run
    implied: Implied | None
    stages: tuple[Observation, ...]
    step: Observation | None
    predicted: Mapping[str, float]
    """Every stage that the model can tell."""
    whole: float | None
    """The step that the model predicts, published or not."""
    problem: str = ""
    """Why the model refuses the row; empty where it does not."""


def compare(run: Run, tuned: Calibration | None = None) -> Compared:
    """Without the time that the row's mean length was taken from. A row that the model refuses keeps the reason."""
    try:
        length = implied(run, tuned)
        found = predict(run, tuned, length.tokens if length else None)
    except CostError as error:
        return Compared(run, None, (), None, {}, None, str(error))
    used = length.column if length and length.anchor == run.id else ""
    published = run.published
    some = run.number("step_selective_recompute_s")
    if some is not None:
        published = {"update": run.number("step_s") or 0.0, "selective": some}
    stages = tuple(
        Observation(run, stage, found.stages[stage], seconds)
        for stage, seconds in published.items()
        if stage in found.stages and used != f"{stage}_s"
    )
    whole = run.number("step_s")
    step = None
    if found.step is not None and whole is not None and used != "step_s" and run.text["placement"] != "train_only":
        step = Observation(run, "step", found.step, whole)
    return Compared(run, length, stages, step, found.stages, found.step)
