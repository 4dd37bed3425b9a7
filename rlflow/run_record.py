"""What a run has written so far, and taking back what it will do again: each step is in the files once.

What is taken back is not lost: the rows of metrics go to `discarded.jsonl`, with the number of the try.
"""

from __future__ import annotations

import json
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
    if any(not stays(row) for row in json_lines(metrics)):
        with discarded.open("a", encoding="utf-8") as file:
            for row in json_lines(metrics):
                if not stays(row):
                    file.write(json.dumps({**row, "try": number}) + "\n")
    keep_lines(metrics, stays)
    for path in (run_dir / "trace").glob("*.jsonl"):
        keep_lines(path, stays, in_place=True)  # ranks have it open already
