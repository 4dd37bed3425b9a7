"""The knobs of a hardware family from published runs.

Each knob has a centre and a width from publications other than the rows, and the rows move it from there: least squares
over logarithms of predicted over published seconds, with a soft absolute loss so that one odd row does not decide, plus
((ln knob - ln centre)/width)^2. With no rows the centres are what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import copysign, exp, log, sqrt

from benchmarks.validation.hardware import device_of
from benchmarks.validation.observe import compare
from benchmarks.validation.runs import Run, runs
from rlflow.cost.knobs import Calibration, calibration

PRIORS: dict[str, dict[str, tuple[float, float]]] = {
    "nvidia": {
        "train_dense": (0.65, 0.25),
        "train_moe": (0.2, 0.4),
        "logprobs_over_train": (0.75, 0.25),
        "decode_memory": (0.71, 0.2),
        "host_layer_s": (30e-6, 0.5),
        "host_step_s": (0.15e-3, 0.5),
        "sync_bandwidth": (0.45, 0.5),
    },
    "ascend": {
        "train_dense": (0.55, 0.25),
        "train_moe": (0.2, 0.4),
        "logprobs_over_train": (0.75, 0.25),
        "decode_memory": (0.71, 0.2),
        "host_layer_s": (30e-6, 0.5),
        "host_step_s": (5e-3, 0.7),
        "sync_bandwidth": (0.45, 0.5),
    },
}
"""Knob to its centre and the deviation of its logarithm."""
SOFT = 0.15
"""Beyond this error a row pulls with a constant force."""
UNUSED = ("X", "C")
"""Grades that are not fitted: rows that contradict themselves, and rows without lengths or stages."""


def family_of(run: Run) -> str:
    return device_of(run).family


def evidence(family: str, without: str = "") -> tuple[Run, ...]:
    """The rows that fit a family, without those of one source."""
    return tuple(
        run
        for run in runs()
        if family_of(run) == family
        and run.grade not in UNUSED
        and run.source != without
        and run.text["mean_response_tokens"]
    )


def residuals(rows: Sequence[Run], tuned: Calibration) -> list[float]:
    """Log errors. All of a row weigh as much as one, and so do all ablations of one system on the same devices."""
    settings = Counter(_setting(run) for run in rows)
    found = []
    for run in rows:
        compared = compare(run, tuned)
        every = [*compared.stages, *([compared.step] if compared.step else [])]
        found += [each.log_error / sqrt(len(every) * settings[_setting(run)]) for each in every]
    return found


def _setting(run: Run) -> tuple[str, ...]:
    return (run.source, *(run.text[column] for column in ("model", "device", "n_devices", "placement")))


def fit(family: str, rows: Sequence[Run]) -> dict[str, float]:
    """The knobs, rounded to three digits."""
    from scipy.optimize import least_squares

    shipped = calibration(family)

    def objective(shifts: Sequence[float]) -> list[float]:
        errors = residuals(rows, shipped.override(**_knobs(family, shifts)))
        return [*(_soft(error) for error in errors), *shifts]

    best = least_squares(objective, [0.0] * len(PRIORS[family]), bounds=(-3, 3), max_nfev=60)
    return {name: float(f"{value:.3g}") for name, value in _knobs(family, best.x).items()}


def _knobs(family: str, shifts: Iterable[float]) -> dict[str, float]:
    """Knobs so many widths from their centres."""
    priors = PRIORS[family]
    return {
        name: exp(log(centre) + s * width) for (name, (centre, width)), s in zip(priors.items(), shifts, strict=True)
    }


def _soft(error: float) -> float:
    """A residual whose square is the soft absolute loss (Charbonnier): as `error`/SOFT near 0, linear far away."""
    return copysign(sqrt(2 * (sqrt(1 + (error / SOFT) ** 2) - 1)), error)
