"""What a run has written so far, and taking back what it will do again: each step is in the files once.

What is taken back is not lost: the rows of metrics go to `discarded.jsonl`, with the number of the try.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    steps, found = set(), set()
    for row in read_rows(metrics):
        if "training/global_step" in row["data"]:
            steps.add(row["step"])
        found |= {(row["step"], name.split("/")[1]) for name in row["data"] if name.startswith(("val/", "val-aux/"))}
    evaluations = {e.name: e.every for program in plan.programs for e in program.evaluations}

    def is_whole(step: int) -> bool:
        due = (name for name, every in evaluations.items() if step == last or (every and step % every == 0))
        return all((step, name) in found for name in due)

    return max(filter(is_whole, steps), default=0)


def forget_after(run_dir: Path, done: int) -> None:
    """Take everything after step `done` out of the metrics and the traces; with 0 everything there is."""
    metrics = run_dir / METRICS
    rows = read_rows(metrics)
    kept = [row for row in rows if 0 < done >= row["step"]]
    dropped = [row for row in rows if not 0 < done >= row["step"]]
    if dropped:
        discarded = run_dir / DISCARDED
        number = max((row.get("try", 0) for row in read_rows(discarded)), default=0) + 1
        with discarded.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({**row, "try": number}) + "\n" for row in dropped)
    building = metrics.with_suffix(".partial")
    building.write_text("".join(json.dumps(row) + "\n" for row in kept), "utf-8")
    building.replace(metrics)
    for path in (run_dir / "trace").glob("*.jsonl"):
        events = [event for event in read_rows(path) if 0 < done >= event["step"]]
        # Written in place: ranks have the file open already.
        path.write_text("".join(json.dumps(event, sort_keys=True) + "\n" for event in events), "utf-8")


def drop_torn_line(path: Path) -> None:
    """A crash may leave half a line at the end; what is appended must start on a new one."""
    if path.is_file():
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if whole != raw:
            path.write_bytes(whole)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, without those that a crash has torn."""
    rows = []
    if path.is_file():
        for line in path.read_text("utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows
