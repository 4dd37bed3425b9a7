"""The picture of `rlflow simulate --sweep`: joins the simulator's studies to the visualizers' chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rlflow.backends.simulator.report_study import Mean, Study
    from rlflow.backends.visualizers.sweep import Sweep, Value


def check_plot(path: Path, sweeps: Sequence[str]) -> None:
    """click.UsageError for a plot that cannot be made, before anything is simulated."""
    if path.suffix.lower() != ".svg":
        raise click.UsageError(f"--plot {path}: plots are SVG; name a file that ends with .svg")
    if not sweeps:
        raise click.UsageError("--plot draws what --sweep finds; add --sweep PATH=A,B,...")
    if not path.absolute().parent.is_dir():
        raise click.UsageError(f"--plot {path}: there is no folder {path.parent}")


def write_plot(
    path: Path, title: str, columns: Sequence[str], rows: Sequence[tuple[Sequence[str], Study | str]]
) -> None:
    """click.UsageError where the file cannot be written."""
    from rlflow.backends.visualizers.sweep import sweep_svg

    try:
        path.write_text(sweep_svg(sweep_of(title, columns, rows)), "utf-8")
    except OSError as error:
        raise click.UsageError(f"--plot {path}: {error.strerror or error}") from None


def sweep_of(title: str, columns: Sequence[str], rows: Sequence[tuple[Sequence[str], Study | str]]) -> Sweep:
    """Throughput, step time and idle device time of every study; a text says why there is none."""
    from rlflow.backends.visualizers.sweep import Measure, Row, Sweep

    studies = [study for _, study in rows if not isinstance(study, str)]
    seeds = max((len(study.results) for study in studies if study.sampled), default=0)
    remark = "stages as estimated"
    if seeds:
        remark = f"lengths drawn with {seeds} seed{'s' * (seeds != 1)}"
        remark += "; bars: 95 % confidence" if seeds > 1 else "; no interval from one seed"
    return Sweep(
        title,
        remark,
        tuple(columns),
        (Measure("tokens/s"), Measure("seconds a step"), Measure("device time in no stage", percent=True)),
        tuple(
            Row(tuple(values), why=study) if isinstance(study, str) else Row(tuple(values), _values(study))
            for values, study in rows
        ),
    )


def _values(study: Study) -> tuple[Value | None, ...]:
    tokens = study.mean(lambda r: r.tokens_per_second) if study.first.tokens_per_step else None
    return (
        None if tokens is None else _value(tokens),
        _value(study.mean(lambda r: float(r.period) / 1e6)),
        _value(study.mean(lambda r: r.bubble)),
    )


def _value(mean: Mean) -> Value:
    from rlflow.backends.visualizers.sweep import Value

    return Value(mean.value, mean.half)
