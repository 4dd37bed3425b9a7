"""Fits, each without one source: made by `make validation`, kept in folds.toml for the report."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from benchmarks.validation.fit import PRIORS, evidence, family_of, fit
from benchmarks.validation.runs import runs
from rlflow.cost.knobs import Calibration, calibration

FILE = Path(__file__).with_name("folds.toml")
ALL = "all"
HEAD = """# Knobs fitted by `make validation`: of every hardware family with all rows, and without the rows of
# one source. A source without rows in the fit has the knobs of `all`. Do not edit.
"""
Folds = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Family to source left out (or `all`) to knobs."""


def sources(family: str) -> tuple[str, ...]:
    """Sources that have rows in the fit of a family."""
    return tuple(sorted({run.source for run in evidence(family)}))


def make() -> Folds:
    """Minutes at most; the same numbers on every machine."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for family in PRIORS:
        found[family] = {ALL: fit(family, evidence(family))}
        for source in sources(family):
            found[family][source] = fit(family, evidence(family, source))
    return found


def write(folds: Folds, file: Path = FILE) -> None:
    lines = [HEAD]
    for family, each in folds.items():
        for source, knobs in each.items():
            lines += [f"[{family}.{source}]", *(f"{name} = {value!r}" for name, value in knobs.items()), ""]
    file.write_text("\n".join(lines).rstrip() + "\n", "utf-8")


@cache
def read(file: Path = FILE) -> Folds:
    return tomllib.loads(file.read_text("utf-8"))


def fitted(family: str, without: str = ALL) -> Calibration:
    """The calibration of a family with the knobs of a fold; that of all rows for a source that is in no fit."""
    folds = read()[family]
    return calibration(family).override(**folds.get(without, folds[ALL]))


def stale() -> list[str]:
    """Knobs whose shipped value is not what all rows fit, within 1 %."""
    found = []
    for family, folds in read().items():
        for name, value in folds[ALL].items():
            shipped = getattr(calibration(family).knobs, name)
            if abs(shipped / value - 1) > 0.01:
                found.append(f"{family}.{name}: calibration.toml has {shipped:.3g}, the rows fit {value:.3g}")
    return found


def families() -> tuple[str, ...]:
    """Families with rows."""
    return tuple(sorted({family_of(run) for run in runs()}))
