"""Which checkpoints a run folder holds, and whether they are whole. No torch here: the driver asks too."""

from __future__ import annotations

from pathlib import Path

from rlflow.backends.ray_runtime.saving.manifest import Damaged, check
from rlflow.diagnostics.diagnostic import RunFailure

LATEST = "latest_checkpointed_iteration.txt"
STATE = "state.json"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` completed steps is; `folder` is the run's `checkpoints`."""
    return folder / f"global_step_{step}"


def whole_steps(folder: Path) -> list[int]:
    """The steps of all checkpoints in `folder`, ascending, whatever their files hold."""
    found = [path.parent.name.removeprefix("global_step_") for path in folder.glob(f"global_step_*/{STATE}")]
    return sorted(int(step) for step in found if step.isdecimal())


def latest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint in `folder`; None without one. RLF5010 for a pointer to nothing."""
    pointer = folder / LATEST
    if not pointer.is_file():
        return None
    text = pointer.read_text("utf-8", errors="replace").strip()
    if not text.isdecimal() or not (checkpoint_path(folder, int(text)) / STATE).is_file():
        raise RunFailure(
            "RLF5010",
            f"`{pointer}` names the checkpoint `{text}`, which is not there or not whole",
            help=(older_hint(folder, int(text) if text.isdecimal() else None),),
        )
    return int(text)


def verify(folder: Path, step: int) -> None:
    """Read a whole checkpoint and compare it with its manifest. RLF5045 names the first file that is not as written.

    Those of versions that wrote no manifest pass; what is wrong with them shows when they are loaded.
    """
    try:
        check(checkpoint_path(folder, step))
    except Damaged as damage:
        raise RunFailure(
            "RLF5045",
            f"`{damage.file}` of the checkpoint of step {step} {damage.why}",
            notes=(f"checkpoint: `{checkpoint_path(folder, step)}`",),
            help=(older_hint(folder, step),),
        ) from None


def older_hint(folder: Path, broken: int | None) -> str:
    """What to do about a broken checkpoint: go back to the newest other one that is whole, when there is one."""
    for step in reversed(whole_steps(folder)):
        if step == broken:
            continue
        try:
            check(checkpoint_path(folder, step))
        except (Damaged, OSError):
            continue
        return f"write {step} into `{folder / LATEST}` to go on from the checkpoint of step {step}"
    return "start the run anew in another folder: there is no other checkpoint"
