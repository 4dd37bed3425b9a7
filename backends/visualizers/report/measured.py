"""Prediction against measurement: of a step, and of every stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Final

from rlflow.amounts import seconds
from rlflow.backends.visualizers.report.subject import Ran, Subject
from rlflow.plan_decisions import StageEstimate
from rlflow.profile.events import recorded

WARM_UP: Final = 2
"""First steps of a run that do not count, as in `rlflow profile`: caches are cold, and allocators grow."""

CURVES: Final = (
    ("mean reward", ("critic/score/mean", "critic/rewards/mean"), ""),
    ("response length", ("response_length/mean",), "tokens"),
    ("loss", ("actor/loss",), ""),
    ("KL to the reference", ("actor/kl_loss",), "nats"),
    ("entropy", ("actor/entropy",), "nats"),
    ("gradient norm", ("actor/grad_norm",), ""),
    ("throughput", ("perf/throughput",), "tokens/s a rank"),
)
"""Title, metrics of which the first that is there counts, unit."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Microseconds; `predicted` None where the plan has no estimate, `error` None then too."""

    name: str
    predicted: float | None
    measured: float
    low: float
    high: float
    """Quartiles."""
    steps: int

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        return None if self.predicted is None or not self.measured else self.predicted / self.measured - 1


def compared(subject: Subject) -> list[Compared]:
    """The step first, then its stages in the order of the plan; only what was measured after the warm-up.

    Of a run that is too short for that, all of its steps count.
    """
    ran = subject.ran
    if ran is None:
        return []
    rows = []
    steps = step_seconds(ran)
    if steps:
        rows.append(_row("step", predicted_step(subject), {step: s * 1e6 for step, s in steps.items()}))
    found = recorded(ran.events)
    parts = {estimate.stage: _parts(estimate) for estimate in subject.plan.estimates}
    for stage in subject.plan.stages:
        if stage.phase != "step":
            continue
        known = parts.get(stage.id, {})
        rows += _found(stage.id, known.get("run"), found.stages.get(stage.id))
        rows += _found(f"call {stage.id}", _called(parts, stage.id), found.calls.get(stage.id))
    for channel in subject.plan.channels:
        published = found.instructions.get(f"publish:{channel.model}")
        rows += _found(f"publish {channel.model}", parts.get(channel.source, {}).get("publish"), published)
    for reshard in subject.plan.reshards:
        moved = found.instructions.get(f"reshard:{reshard.id}")
        rows += _found(f"reshard {reshard.id}", float(reshard.us) or None, moved)
    return rows


def _parts(estimate: StageEstimate) -> dict[str, float]:
    """`run` is the stage itself. A profile adds `publish` and `call STAGE`; the cost model's parts are all of `run`."""
    if not estimate.measured:
        return {"run": float(estimate.us)}
    return {name: float(us) for name, us in estimate.parts}


def _called(parts: Mapping[str, Mapping[str, float]], stage: str) -> float | None:
    return next((own[f"call {stage}"] for own in parts.values() if f"call {stage}" in own), None)


def _found(name: str, predicted: float | None, times: Mapping[int, int] | None) -> list[Compared]:
    """The row of what was measured in steps, not in evaluations; none without that."""
    known = {step: float(us) for step, us in (times or {}).items() if step > 0}
    return [_row(name, predicted, known)] if known else []


def profile_words(subject: Subject) -> str:
    """How much of the error of the step comes from the machine, and how much from adding up stages; empty where the
    profile or the run is not known."""
    step = next((row for row in compared(subject) if row.name == "step"), None)
    if subject.profile is None or step is None or step.predicted is None or not subject.profile.step_us:
        return ""
    own = subject.profile.step_us
    return (
        f"Against the step of {seconds(own)} that the profile itself measured, the prediction is at "
        f"{step.predicted / own - 1:+.0%} and this run at {step.measured / own - 1:+.0%}: the first comes from adding "
        "up stages, the second from the machine, which was busier or less busy."
    )


def step_seconds(ran: Ran) -> dict[int, float]:
    """Step to its seconds, as the run measured them."""
    return {int(step): taken for step, taken in _points(ran, ("timing_s/step",))}


def predicted_step(subject: Subject) -> float | None:
    """Microseconds of a step: of the simulation, else of the estimates; None where neither knows."""
    if subject.simulated is not None:
        return float(subject.simulated.period_us)
    return None if subject.plan.cadence is None else float(subject.plan.cadence.us)


def _row(name: str, predicted: float | None, times: Mapping[int, float]) -> Compared:
    counted = [us for step, us in sorted(times.items()) if step > WARM_UP] or list(times.values())
    low, high = counted[0], counted[0]
    if len(counted) > 1:
        low, _, high = quantiles(counted, n=4, method="inclusive")
    return Compared(name, predicted, median(counted), low, high, len(counted))


def curves_of(subject: Subject) -> list[dict[str, Any]]:
    """Line charts of a run: seconds of a step with the prediction, learning curves, and held-out scores."""
    ran = subject.ran
    if ran is None:
        return []
    charts: list[dict[str, Any]] = []
    steps = step_seconds(ran)
    if steps:
        series: list[dict[str, Any]] = [{"name": "measured", "points": sorted(steps.items())}]
        predicted = predicted_step(subject)
        if predicted is not None:
            ends = [min(steps), max(steps)]
            series.append({"name": "predicted", "points": [[step, predicted / 1e6] for step in ends], "dashed": True})
        charts.append({"title": "time of a step", "unit": "s", "series": series, "from_zero": True})
    for title, names, unit in CURVES:
        points = _points(ran, names)
        if points:
            charts.append({"title": title, "unit": unit, "series": [{"name": title, "points": points, "smooth": True}]})
    held = sorted({name for row in ran.metrics for name in row["data"] if name.startswith("val/")})
    if held:
        named = [{"name": name.removeprefix("val/"), "points": _points(ran, (name,)), "dots": True} for name in held]
        charts.append({"title": "held-out scores", "unit": "", "series": [line for line in named if line["points"]]})
    return [chart for chart in charts if chart["series"]]


def _points(ran: Ran, names: tuple[str, ...]) -> list[list[float]]:
    """(step, value) of the first metric that is there. Of a step the last row counts; infinite values are left out."""
    found: dict[int, float] = {}
    for row in ran.metrics:
        value = next((row["data"][name] for name in names if name in row["data"]), None)
        if isinstance(value, int | float) and abs(value) < float("inf"):
            found[int(row["step"])] = float(value)
    return [[step, value] for step, value in sorted(found.items())]
