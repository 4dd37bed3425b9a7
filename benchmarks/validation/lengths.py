"""Mean lengths of responses that rows do not publish, from one published time of their workload.

Rows of one model, algorithm, batch and limit answer the same prompts alike. One of them is the anchor: the mean is what
makes its prediction meet one of its times, which then counts as no evidence; all its other times and rows do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import exp, log

from benchmarks.validation.predict import predict
from benchmarks.validation.runs import Run, runs
from benchmarks.validation.workloads import limit_of, prompt_of
from rlflow.cost.knobs import Calibration


@dataclass(frozen=True, slots=True)
class Implied:
    """The mean length of a workload: `anchor` is the row and `column` the time that it was taken from."""

    tokens: float
    anchor: str
    column: str


def workload_key(run: Run) -> tuple[str, ...]:
    """Rows that time their updates are compared within a placement only: with as many trainers, the same page's update
    takes 270 s where they share devices with engines and 157 s where they do not, so the batches differ (V1, V5)."""
    columns = ("model", "algorithm", "prompts_per_step", "samples_per_prompt", "max_response_tokens")
    return (*(run.text[column] for column in columns), run.text["placement"] if run.text["update_s"] else "")


def implied(run: Run, tuned: Calibration | None = None) -> Implied | None:
    """None where the row publishes a mean, where its batch is not known, or where no mean meets the time."""
    if run.number("mean_response_tokens") is not None or not run.text["prompts_per_step"]:
        return None
    return _implied(workload_key(run), tuned)


@cache
def _implied(key: tuple[str, ...], tuned: Calibration | None) -> Implied | None:
    alike = [each for each in runs() if workload_key(each) == key and each.grade != "X"]
    synchronous = [each for each in alike if each.is_synchronous] or alike
    for column in ("update_s", "step_s", "throughput_tokens_per_s_per_device"):
        for anchor in synchronous:
            value = anchor.number(column)
            found = None if value is None else _solve(anchor, column, value, tuned)
            if found is not None:
                return Implied(found, anchor.id, column)
    return None


def _solve(run: Run, column: str, value: float, tuned: Calibration | None) -> float | None:
    """The mean in [32, limit) at which the prediction is `value`; of several the shortest, on a grid of factors 1.5."""

    def off(log_tokens: float) -> float | None:
        seconds = predicted(run, column, exp(log_tokens), tuned)
        return None if seconds is None else log(seconds / value)

    limit = limit_of(run)
    if limit is None:
        return None
    low, end = log(32.0), log(0.98 * limit)
    before = off(low)
    if before is None:
        return None
    while low < end:
        high = min(end, low + 0.4)
        after = off(high)
        if after is None:
            return None
        if (before < 0) != (after < 0):
            return exp(_bisect(off, low, high, before < 0))
        low, before = high, after
    return None


def _bisect(off: Callable[[float], float | None], low: float, high: float, rising: bool) -> float:
    for _ in range(12):
        middle = (low + high) / 2
        value = off(middle)
        low, high = (middle, high) if value is not None and (value < 0) == rising else (low, middle)
    return (low + high) / 2


def predicted(run: Run, column: str, tokens: float, tuned: Calibration | None) -> float | None:
    """What the column would be with this mean length."""
    found = predict(run, tuned, tokens)
    if column == "update_s":
        return found.stages.get("update")
    if column == "step_s" or found.step is None:
        return found.step
    prompts, samples, devices = (run.count(c) or 0 for c in ("prompts_per_step", "samples_per_prompt", "n_devices"))
    return prompts * samples * (prompt_of(run) + tokens) / found.step / devices
