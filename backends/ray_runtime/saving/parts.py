"""A checkpoint's parts on the disk: written beside its place, put together by whoever writes the last one, renamed.

A part is a folder `.global_step_N.PART.partial` with its files, a `state.json` and a `manifest.json`. Its own manifest
comes last. Nothing here is torch's.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.backends.ray_runtime.checkpoint_folder import LATEST, STATE, checkpoint_path, whole_steps
from rlflow.backends.ray_runtime.saving.manifest import (
    MANIFEST,
    Entries,
    entries_of,
    read_manifest,
    sync,
    write_manifest,
)


def part_path(folder: Path, step: int, part: str) -> Path:
    """Where a part is written; `folder` is the run's `checkpoints`."""
    return folder / f".global_step_{step}.{part}.partial"


def begin_part(path: Path) -> None:
    """An empty folder."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def files_below(folder: Path) -> list[Path]:
    """Every file of a part but those that say what is in it."""
    return sorted(
        p for p in folder.rglob("*") if p.is_file() and p.relative_to(folder).as_posix() not in (STATE, MANIFEST)
    )


def end_part(path: Path, state: Mapping[str, Any], entries: Entries) -> None:
    """Write the part's state and, last, its manifest; `entries`: of its other files."""
    for below in [path, *path.rglob("*")]:
        if below.is_dir():
            sync(below)
    _write_state(path, state)
    write_manifest(path, entries | entries_of(path, [path / STATE]))


def publish(folder: Path, step: int, whole: Path, keep: int) -> None:
    """Put all parts of a checkpoint into `whole`, one of them; rename it into place and point to it. Then remove what
    is older than the `keep` newest (0 = nothing)."""
    for part in sorted(folder.glob(f".global_step_{step}.*.partial")):
        if part != whole and (part / MANIFEST).is_file():
            _join(whole, part)
    target, aside = checkpoint_path(folder, step), _aside(folder, step)
    if target.exists():  # a run that went on from an older one writes it again
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(target, aside)
    os.replace(whole, target)
    sync(folder)
    pointer = folder / (LATEST + ".partial")
    pointer.write_text(f"{step}\n", "utf-8")
    sync(pointer)
    os.replace(pointer, folder / LATEST)
    sync(folder)
    shutil.rmtree(aside, ignore_errors=True)
    if keep:
        _prune(folder, step, keep)


def clean(folder: Path) -> None:
    """Before a run: remove what a killed one has left half-written, and put back what it was about to replace."""
    for aside in folder.glob(".global_step_*.replaced"):
        target = folder / aside.name.removeprefix(".").removesuffix(".replaced")
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.replace(aside, target)
    for left in (*folder.glob(".global_step_*.partial"), *folder.glob(".global_step_*.pruned")):
        shutil.rmtree(left, ignore_errors=True)
    (folder / (LATEST + ".partial")).unlink(missing_ok=True)


def _join(whole: Path, part: Path) -> None:
    """Move a part's files into `whole`. Versions are each pool's own; cursors are those furthest on."""
    body, other = (json.loads((path / STATE).read_text("utf-8")) for path in (whole, part))
    files, more = read_manifest(whole) or {}, read_manifest(part) or {}
    for name in more:
        if name != STATE:
            (whole / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(part / name, whole / name)
    cursors = body["cursors"]
    for name, cursor in other["cursors"].items():
        cursors[name] = max(cursor, cursors.get(name, 0))
    for name in ("versions", "data", "ahead", "owned", "models", "edges"):
        body[name] |= other[name]
    (whole / MANIFEST).unlink()
    _write_state(whole, body)
    write_manifest(whole, {n: e for n, e in (files | more).items() if n != STATE} | entries_of(whole, [whole / STATE]))
    shutil.rmtree(part)


def _write_state(folder: Path, state: Mapping[str, Any]) -> None:
    (folder / STATE).write_text(json.dumps(state, indent=2, sort_keys=True) + "\n", "utf-8")


def _prune(folder: Path, newest: int, keep: int) -> None:
    """Steps beyond the newest are those of a run that was given up: they do not count, and are left alone."""
    steps = [step for step in whole_steps(folder) if step <= newest]
    for step in steps[:-keep]:
        going = folder / f".global_step_{step}.pruned"
        os.replace(checkpoint_path(folder, step), going)  # so that it is whole, or is not there
        shutil.rmtree(going, ignore_errors=True)


def _aside(folder: Path, step: int) -> Path:
    return folder / f".global_step_{step}.replaced"
