"""How many rows a stage makes in a step."""

from __future__ import annotations

import re

from rlflow.plan import Stage

_ROWS = re.compile(r"rows<\w+ (?P<rows>\?|\d+)(?:/(?P<group>\d+))? of ")


def rows_of(stage: Stage) -> tuple[int, int]:
    """(samples of a batch, samples of a prompt) of a generate stage, as its type says; one sample where the number is
    known only while running."""
    found = _ROWS.match(stage.output)
    if found is None:
        raise ValueError(f"stage {stage.id} gives `{stage.output}`, which are no rows")
    group = int(found["group"] or 1)
    return (group if found["rows"] == "?" else int(found["rows"])), group
