"""What a run has written so far, and taking back what it will do again: each step is in the files once.

What is taken back is not lost: the rows of metrics go to `discarded.jsonl`, with the number of the try.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.run_rows import json_lines, keep_lines

if TYPE_CHECKING:
    from rlflow.plan import Plan

METRICS = "metrics.jsonl"
DISCARDED = "discarded.jsonl"


def recorded_step(plan: Plan, metrics: Path, last: int | None) -> int | None:
    """The last step that is written down with the evaluations that follow it; None where there is no such file.

    0 = none of the steps. `last`: the step that the run ends with, where known; all evaluations follow it.
    """
    if not metrics.is_file():
        return None
    evaluations = {e.name: e.every for program in plan.programs for e in program.evaluations}
    steps: set[int] = set()
    found: set[tuple[int, str]] = set()
    for row in json_lines(metrics):
        if "training/global_step" in row["data"]:
            steps.add(row["step"])
        found |= {(row["step"], name.split("/")[1]) for name in row["data"] if name.startswith(("val/", "val-aux/"))}

    def is_whole(step: int) -> bool:
        due = (name for name, every in evaluations.items() if step == last or (every and step % every == 0))
        return all((step, name) in found for name in due)

    return max(filter(is_whole, steps), default=0)


def forget_after(run_dir: Path, done: int) -> None:
    """Take everything after step `done` out of the metrics and the traces; with 0 everything there is."""

    def stays(row: dict[str, Any]) -> bool:
        return bool(0 < done >= row.get("step", done + 1))

    metrics, discarded = run_dir / METRICS, run_dir / DISCARDED
    number = max((row.get("try", 0) for row in json_lines(discarded)), default=0) + 1
    dropped = (row for row in json_lines(metrics) if not stays(row))
    first = next(dropped, None)
    if first is not None:
        with discarded.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**first, "try": number}) + "\n")
            file.writelines(json.dumps({**row, "try": number}) + "\n" for row in dropped)
    keep_lines(metrics, stays)
    for path in (run_dir / "trace").glob("*.jsonl"):
        _keep_in_place(path, stays)


def _keep_in_place(path: Path, stays: Callable[[dict[str, Any]], bool]) -> None:
    """As `keep_lines`, in the same file: ranks have it open already."""
    kept = path.with_suffix(".partial")
    with kept.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, sort_keys=True) + "\n" for row in json_lines(path) if stays(row))
    with kept.open("rb") as source, path.open("rb+") as target:
        while part := source.read(1 << 20):
            target.write(part)
        target.truncate()
    os.unlink(kept)
