"""Measured lengths from a CSV file with a header."""

from __future__ import annotations

import csv
from pathlib import Path

from rlflow.cost.errors import WorkloadError
from rlflow.cost.lengths import Trace


def read_trace(path: Path, column: str, prompt: str | None = None) -> Trace:
    """The lengths in a column. `prompt` names a column whose values say which samples are of one prompt; rows of a
    prompt need not be neighbours. WorkloadError for columns or numbers that are not there, and for prompts with
    different numbers of samples."""
    groups: dict[str, list[float]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        missing = [name for name in (column, prompt) if name is not None and name not in (rows.fieldnames or ())]
        if missing:
            raise WorkloadError(f"{path} has no column {missing[0]!r}")
        for row in rows:
            try:
                tokens = float(row[column])
            except (TypeError, ValueError):
                raise WorkloadError(f"{path}:{rows.line_num}: {row[column]!r} is not a number of tokens") from None
            if not 0 <= tokens < float("inf"):
                raise WorkloadError(f"{path}:{rows.line_num}: {tokens} tokens are impossible")
            groups.setdefault("" if prompt is None else row[prompt], []).append(tokens)
    if not groups:
        raise WorkloadError(f"{path} has no rows")
    sizes = {len(group) for group in groups.values()}
    if prompt is None:
        return Trace(tuple(groups[""]))
    if len(sizes) > 1:
        raise WorkloadError(f"{path}: prompts have {min(sizes)} to {max(sizes)} samples; a trace needs as many of each")
    return Trace(tuple(tokens for group in groups.values() for tokens in group), sizes.pop())
