"""`manifest.json`: every file of a checkpoint with its size and sha256: damage is found before a run goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 2
"""Of a checkpoint's folder. 1 had no manifest, and optimizer states in files of torch.save."""
_THREADS = 8
"""Files that are read at once; hashing lets other threads run."""

Entries = dict[str, dict[str, Any]]
"""Path relative to the checkpoint, with slashes, to `bytes` and `sha256` (hex)."""


class Damaged(Exception):
    """A file is not what was written; `file` relative to the checkpoint."""

    def __init__(self, file: str, why: str) -> None:
        super().__init__(f"`{file}` {why}")
        self.file = file
        self.why = why


def entries_of(folder: Path, paths: Iterable[Path]) -> Entries:
    """Size and digest of some files below `folder`, each forced to the disk."""

    def entry(path: Path) -> tuple[str, dict[str, Any]]:
        sync(path)
        return path.relative_to(folder).as_posix(), {"bytes": path.stat().st_size, "sha256": digest_of(path)}

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(sorted(pool.map(entry, list(paths))))


def write_manifest(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Written last: a folder with a manifest is whole."""
    body = {"format": FORMAT, "files": dict(sorted(files.items()))}
    path = folder / MANIFEST
    path.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n", "utf-8")
    sync(path)
    sync(folder)


def read_manifest(folder: Path) -> Entries | None:
    """None where there is none: a checkpoint of an older version. Damaged when it cannot be read."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        body = json.loads(path.read_text("utf-8"))
        found, files = body["format"], body["files"]
        entries: Entries = {name: {"bytes": int(e["bytes"]), "sha256": str(e["sha256"])} for name, e in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(MANIFEST, f"cannot be read ({type(error).__name__})") from None
    if found != FORMAT:
        raise Damaged(MANIFEST, f"has format {found}, and this version reads format {FORMAT}")
    return entries


def check(folder: Path, *, contents: bool = True) -> None:
    """Damaged for the first file that is missing, has another size or, with `contents`, other bytes."""
    entries = read_manifest(folder)
    if entries is None:
        return
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            raise Damaged(name, "is missing")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise Damaged(name, f"has {size} bytes, and {entry['bytes']} were written")
    if not contents:
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = dict(zip(entries, pool.map(lambda name: digest_of(folder / name), entries), strict=True))
    for name, entry in entries.items():
        if digests[name] != entry["sha256"]:
            raise Damaged(
                name, f"is damaged: its sha256 is {digests[name][:16]}..., and {entry['sha256'][:16]}... was written"
            )


def digest_of(path: Path) -> str:
    """sha256 (hex)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
