"""Reading a run folder while it grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlflow.runs import read_run_json

RUNNING = "running"


class Follower:
    """Gives the rows of a run's metrics.jsonl as they come.

    A line counts once it is whole. A file that became shorter or was replaced (the run was resumed from an earlier
    step) is read again from its start, and rows of steps that come again are given again.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._path = run_dir / "metrics.jsonl"
        self._read = 0
        """Bytes of the file that have been given."""
        self._file: tuple[int, int] = (0, 0)
        """Device and number of the file that they are of."""

    def facts(self) -> dict[str, Any]:
        """run.json; empty before it is written."""
        return read_run_json(self.run_dir)

    def rows(self) -> list[dict[str, Any]]:
        """The rows that are new since the last call; lines that are no row are left out."""
        try:
            with self._path.open("rb") as file:
                self._restart_if_replaced()
                file.seek(self._read)
                fresh = file.read()
        except OSError:
            return []
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._read += len(whole)
        return [row for line in whole.splitlines() if (row := _row(line)) is not None]

    def _restart_if_replaced(self) -> None:
        status = self._path.stat()
        file = (status.st_dev, status.st_ino)
        if file != self._file or status.st_size < self._read:
            self._file, self._read = file, 0

    def quiet_seconds(self, now: float) -> float:
        """Seconds since the folder's metrics or state were last written; `now` in seconds since the epoch."""
        times = [path.stat().st_mtime for path in (self._path, self.run_dir / "run.json") if path.is_file()]
        return max(0.0, now - max(times, default=now))


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("data"), dict)
    return row if is_row else None


def newest_run(below: Path) -> Path | None:
    """The run folder that was started last, of `below/<flow>/<run>`."""
    found = [path.parent for path in below.glob("*/*/plan.json")]
    return max(found, key=lambda folder: (folder / "plan.json").stat().st_mtime, default=None)
