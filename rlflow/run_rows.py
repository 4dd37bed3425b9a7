"""The files of a run that grow with its steps: read and rewritten a line at a time, so that long runs fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file, in order; lines torn by a crash are left out, a missing file has none."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool], *, in_place: bool = False) -> None:
    """Rewrite a JSON Lines file with the objects that are wanted; a failure leaves the old file.

    `in_place`: for a file that other processes have open. Then a failure of the last moment may leave half of it.
    """
    building = path.with_suffix(".partial")
    with building.open("w", encoding="utf-8") as out:
        for row in json_lines(path):
            if wanted(row):
                out.write(json.dumps(row) + "\n")
    if not in_place:
        building.replace(path)
        return
    with building.open("rb") as source, path.open("rb+") as target:
        shutil.copyfileobj(source, target)
        target.truncate()
    building.unlink()


def drop_torn_line(path: Path) -> None:
    """A crash may leave half a line at the end; what is appended must start on a new one."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = file.seek(0, 2)
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                file.truncate(start + found + 1)
                return
            end = start
        file.truncate(0)
