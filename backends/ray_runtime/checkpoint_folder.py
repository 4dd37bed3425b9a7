"""Which checkpoints a run folder holds. No torch here: the driver asks too."""

from __future__ import annotations

from pathlib import Path

from rlflow.diagnostics.diagnostic import RunFailure

LATEST = "latest_checkpointed_iteration.txt"
STATE = "state.json"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` completed steps is; `folder` is the run's `checkpoints`."""
    return folder / f"global_step_{step}"


def latest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint in `folder`; None without one. RLF5010 for a pointer to nothing."""
    pointer = folder / LATEST
    if not pointer.is_file():
        return None
    text = pointer.read_text("utf-8", errors="replace").strip()
    if not text.isdigit() or not (checkpoint_path(folder, int(text)) / STATE).is_file():
        raise RunFailure(
            "RLF5010",
            f"`{pointer}` names the checkpoint `{text}`, which is not there or not whole",
            help=(older_hint(folder, int(text) if text.isdigit() else None),),
        )
    return int(text)


def older_hint(folder: Path, broken: int | None) -> str:
    """What to do about a broken checkpoint: go back to the newest other one, when there is one."""
    steps = [step for step in whole_steps(folder) if step != broken]
    if not steps:
        return "start the run anew in another folder: there is no other checkpoint"
    return f"write {steps[-1]} into `{folder / LATEST}` to go on from the checkpoint of step {steps[-1]}"


def whole_steps(folder: Path) -> list[int]:
    """The steps of all checkpoints that are there, the oldest first."""
    found = [path.parent.name.removeprefix("global_step_") for path in folder.glob(f"global_step_*/{STATE}")]
    return sorted(int(step) for step in found if step.isdigit())
