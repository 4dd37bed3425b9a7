"""docs/validation.md, from the shipped knobs and the fits in folds.toml."""

from __future__ import annotations

from pathlib import Path
from string import Template

from benchmarks.validation import folds
from benchmarks.validation.fit import PRIORS, evidence
from benchmarks.validation.measures import median_error, ordered_pairs, rank_correlation
from benchmarks.validation.observe import Observation
from benchmarks.validation.predict import STAGE_NAMES
from benchmarks.validation.report_rows import row_tables
from benchmarks.validation.results import ODD, LeftOut, compositions, left_out, medians, shipped, wholes
from benchmarks.validation.tables import percent, seconds, share, table

PAGE = Path(__file__).with_name("page.md")
DOC = Path(__file__).parents[2] / "docs" / "validation.md"


def report() -> str:
    """The whole page: the words of page.md around tables. Predicts every row a few times: seconds."""
    return Template(PAGE.read_text("utf-8")).substitute(
        summary=summary(),
        stages=stages(),
        knobs=knobs(),
        rows=row_tables(),
        composition=composition(),
        left_out=folds_table(),
        order=order(),
    )


def summary() -> str:
    found = medians()
    plans = rank_correlation([(each.predicted, each.published) for each in wholes(shipped())])
    assert plans is not None
    rows = [
        ("Megatron-LM training iterations, largest error", "10 %", found["megatron"], 0.10),
        ("steps from the published times of their stages, median", "5 %", found["composition"], 0.05),
        ("the same, share in no stage from other sources", "5 %", found["composition_left_out"], 0.05),
        ("steps of a source that is left out of the fit, median", "15 %", found["steps_left_out"], 0.15),
        ("steps with the shipped knobs, median", "", found["steps"], None),
        ("single stages with the shipped knobs, median", "", found["stages"], None),
    ]
    lines = [
        (name, f"at most {aim}" if aim else "", share(value), _met(value, limit)) for name, aim, value, limit in rows
    ]
    met = "yes" if plans >= 0.95 else "no"
    lines.append(("rank correlation of all runs (Spearman)", "at least 0.95", f"{plans:.3f}", met))
    return table(("what", "aim", "result", "met"), lines)


def stages() -> str:
    """Errors by stage, with the shipped knobs."""
    every = [o for each in shipped() if each.run.grade != ODD for o in each.stages]
    every += [each.step for each in shipped() if each.step and each.run.grade != ODD]
    rows = []
    for name in dict.fromkeys([*STAGE_NAMES, "rollout", "step"]):
        errors = sorted(o.error for o in every if o.stage == name)
        if errors:
            spread = f"{percent(errors[0])} to {percent(errors[-1])}"
            rows.append((STAGE_NAMES.get(name, name), str(len(errors)), share(median_error(errors)), spread))
    return table(("stage", "rows", "median error", "from, to"), rows)


def _met(value: float | None, limit: float | None) -> str:
    if limit is None or value is None:
        return ""
    return "yes" if value <= limit else "no"


def knobs() -> str:
    """One table a family: centre and width, the fit of all rows, and of each fold."""
    texts = []
    for family, priors in PRIORS.items():
        each = folds.read()[family]
        names = [name for name in each if name != folds.ALL]
        head = ("knob", "centre", "width", "shipped", *(f"without {name}" for name in names))
        rows = [
            (f"`{knob}`", f"{centre:g}", f"{width:g}", *(f"{each[name][knob]:g}" for name in (folds.ALL, *names)))
            for knob, (centre, width) in priors.items()
        ]
        ids = ", ".join(run.id for run in evidence(family))
        texts.append(f"**{family}**, fitted on {ids}:\n\n{table(head, rows)}")
    return "\n\n".join(texts)


def composition() -> str:
    rows = [
        (
            each.run.id,
            each.run.text["mode"].replace("_", " "),
            seconds(each.published),
            seconds(each.composed),
            percent(each.error),
            percent(each.left_out_error),
        )
        for each in compositions()
    ]
    return table(("row", "mode", "published s", "composed s", "error", "share of other sources"), rows)


def folds_table() -> str:
    rows = [_fold(each) for each in left_out()]
    return table(
        ("source", "in the fit of other sources", "steps", "median error", "each step", "stages, median"), rows
    )


def _fold(each: LeftOut) -> tuple[str, ...]:
    steps = ", ".join(f"{step.run.id} {percent(step.error)}" for step in each.steps)
    return (
        each.source,
        "yes" if each.fitted else "no",
        str(len(each.steps)),
        share(median_error(step.error for step in each.steps)),
        steps,
        share(median_error(stage.error for stage in each.stages)),
    )


def order() -> str:
    all_rows = wholes(shipped())
    pooled = rank_correlation([(each.predicted, each.published) for each in all_rows])
    without = _without()
    again = rank_correlation([(each.predicted, each.published) for each in without])
    right, total = ordered_pairs(all_rows)
    right_without, total_without = ordered_pairs(without)
    rows = [
        ("shipped knobs", str(len(all_rows)), f"{pooled:.3f}", f"{right} of {total}"),
        ("source left out", str(len(without)), f"{again:.3f}", f"{right_without} of {total_without}"),
    ]
    head = ("", "runs", "rank correlation of all", "pairs of one workload in the right order")
    return table(head, rows)


def _without() -> tuple[Observation, ...]:
    """The whole times of rows, each with the knobs fitted without its source."""
    found = []
    for source in left_out():
        alone = [o for o in source.stages if o.run.text["placement"] == "rollout_only" or o.stage == "update"]
        found += [*source.steps, *(o for o in alone if o.run.text["placement"] in ("rollout_only", "train_only"))]
    return tuple(found)
