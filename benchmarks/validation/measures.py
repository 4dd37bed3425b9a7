"""Medians and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median

from benchmarks.validation.observe import Compared, Observation
from benchmarks.validation.runs import Run


def whole(compared: Compared) -> Observation | None:
    """The time of all that a row is about: its step, or the one stage of a row without a step."""
    if compared.step is not None:
        return compared.step
    alone = compared.run.text["placement"] in ("rollout_only", "train_only")
    return compared.stages[0] if alone and compared.stages else None


def median_error(errors: Iterable[float]) -> float | None:
    """Median of absolute relative errors; None of nothing."""
    found = [abs(error) for error in errors]
    return median(found) if found else None


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their ranks."""
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in values}
    return [first[value] + (ordered.count(value) + 1) / 2 for value in values]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman 1904: the correlation of ranks. None for fewer than three pairs or without any spread."""
    if len(pairs) < 3:
        return None
    a, b = (ranks(list(values)) for values in zip(*pairs, strict=True))
    middle = (len(pairs) + 1) / 2
    top = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    bottom = sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)
    return float(top / bottom**0.5) if bottom else None


def plan_key(run: Run) -> tuple[str, ...]:
    """Rows with the same key answer like prompts with the same model: they differ in plan and machine."""
    columns = ("model", "prompts_per_step", "samples_per_prompt", "max_response_tokens", "max_sequence_tokens")
    return tuple(run.text[column] for column in columns)


def ordered_pairs(found: Sequence[Observation]) -> tuple[int, int]:
    """Of all pairs of rows with one key: how many the model puts in the published order, and how many there are.

    Pairs whose published times are within 5 % of each other have no order.
    """
    right = total = 0
    for a, b in combinations(found, 2):
        if plan_key(a.run) != plan_key(b.run) or abs(a.published / b.published - 1) <= 0.05:
            continue
        total += 1
        right += (a.predicted < b.predicted) == (a.published < b.published)
    return right, total
