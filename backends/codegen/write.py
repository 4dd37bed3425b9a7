"""Writes launch files into a folder, and never over what a person put there or changed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rlflow.diagnostics import RunFailure

MANIFEST: Final = ".rlflow-emit.json"
"""What was written, with digests: how an edited file is told from one that may be replaced."""
_EXECUTABLE = (".sh", ".sbatch")


def write_files(folder: Path, files: Mapping[str, bytes | Path]) -> None:
    """Write everything, and remove what an earlier call wrote and this one does not. RLF4009, before anything is
    written, for files that are not as an earlier call wrote them."""
    before = _refuse_foreign(folder, files)
    for name in sorted(set(before) - set(files)):
        (folder / name).unlink(missing_ok=True)
    digests = {}
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        building = path.with_name(path.name + ".partial")
        if isinstance(content, bytes):
            building.write_bytes(content)
        else:
            shutil.copyfile(content, building)
        building.chmod(0o755 if path.suffix in _EXECUTABLE else 0o644)
        building.replace(path)
        digests[name] = _digest(path)
    text = json.dumps({"format": "rlflow.emit", "files": digests}, indent=2, sort_keys=True) + "\n"
    (folder / MANIFEST).write_text(text, "utf-8")


def _refuse_foreign(folder: Path, files: Mapping[str, bytes | Path]) -> dict[str, str]:
    """The digests of an earlier call, when nothing stands in the way."""
    if not folder.exists():
        return {}
    if not folder.is_dir():
        raise RunFailure("RLF4009", f"`{folder}` is a file, not a folder", help=("give another folder with -o",))
    before = _manifest(folder / MANIFEST)
    if before is None:
        there = sorted(path.name for path in folder.iterdir())
        if there:
            raise RunFailure(
                "RLF4009",
                f"the folder `{folder}` holds other files",
                notes=(_listed(there),),
                help=("give an empty folder, or a new one, with -o",),
            )
        return {}
    ours = sorted({*files, *before})
    there = [name for name in ours if (folder / name).exists() or (folder / name).is_symlink()]
    foreign = [name for name in there if name in files and name not in before]
    edited = [name for name in there if name in before and not _is_unchanged(folder / name, before[name])]
    if foreign or edited:
        notes = [f"changed since they were written: {_listed(edited)}"] if edited else []
        notes += [f"not written by `rlflow emit`: {_listed(foreign)}"] if foreign else []
        raise RunFailure(
            "RLF4009",
            f"files in `{folder}` would be lost",
            notes=notes,
            help=("give another folder with -o, or move these files away",),
        )
    return before


def _manifest(path: Path) -> dict[str, str] | None:
    """None when there is none that can be read."""
    try:
        raw = json.loads(path.read_text("utf-8"))
        files = raw["files"] if raw["format"] == "rlflow.emit" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(files, dict) or not all(_is_inside(name) for name in files):
        return None
    return {str(name): str(digest) for name, digest in files.items()}


def _is_inside(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts


def _is_unchanged(path: Path, digest: str) -> bool:
    return path.is_file() and not path.is_symlink() and _digest(path) == digest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _listed(names: list[str], most: int = 5) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
