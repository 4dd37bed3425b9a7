"""A sink in a process of its own: `python -m rlflow.sinks.apart NAME`, fed over a pipe.

Libraries that follow experiments start threads and services, take over Ctrl-C and write to the terminal; in a process
of their own none of that reaches the run. What they print is in RUN_DIR/logs/log-NAME.log. Where the run's driver is
killed the pipe ends, and the sink closes what it has as `failed`.

Lines on the pipe are JSON: first the run, then rows `[step, data]`, at last the status. Answers: `ready`, `closed`, or
`failed TYPE: message`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

from rlflow.sinks.sink import RunInfo, Sink

OPEN_S = 120.0
"""For a library to be imported and a run to be opened, on a server perhaps."""


class SinkDied(Exception):
    """The process of a sink is gone, or cannot do what it should; the message is what it said last."""


class SinkApart:
    """The driver's end. States: new -> wait_open -> log ... -> close, from any of them -> kill."""

    def __init__(self, name: str, info: RunInfo) -> None:
        """Start the process."""
        self._log = info.folder / "logs" / f"log-{name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlflow.sinks.apart", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the run
            )
        self._told = dataclasses.asdict(info) | {"folder": str(info.folder.absolute())}

    def wait_open(self, seconds: float = OPEN_S) -> None:
        """Wait until the sink is open. SinkDied when it is not within so many seconds."""
        try:
            self._say(self._told)
            self._hear("ready", seconds)
        except SinkDied:
            self.kill()
            raise

    def log(self, step: int, data: Mapping[str, float]) -> None:
        self._say([step, dict(data)])

    def close(self, status: str) -> None:
        self._say(status)
        self._hear("closed", None)
        self._process.wait()
        self._close_pipes()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue  # what was not written yet goes nowhere

    def _say(self, line: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._hear("", 5.0)

    def _hear(self, expected: str, seconds: float | None) -> None:
        """Wait for a word; any other is raised."""
        stream = self._process.stdout
        assert stream is not None
        until = None if seconds is None else time.monotonic() + seconds
        said = b""
        while not said.endswith(b"\n"):
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([stream], [], [], left)[0]:
                raise SinkDied(f"nothing came within {seconds:g} s; its log: {self._log}")
            got = os.read(stream.fileno(), 65536)
            if not got:
                break
            said += got
        words = said.decode(errors="replace").strip()
        if words != expected:
            raise SinkDied(f"{words.removeprefix('failed ') or 'its process ended'}; its log: {self._log}")


def serve(name: str, lines: Iterable[str], answers: IO[str]) -> int:
    """The process: open the sink, write rows, close it; the exit code."""
    from rlflow.sinks.names import opener

    rows = iter(lines)
    sink: Sink | None = None
    try:
        told = json.loads(next(rows))
        sink = opener(name)(RunInfo(**told | {"folder": Path(told["folder"])}))
        print("ready", file=answers, flush=True)
        status = "failed"  # the driver is gone without a word
        for line in rows:
            row = json.loads(line)
            if isinstance(row, str):
                status = row
                break
            sink.log(int(row[0]), row[1])
        sink.close(status)
        print("closed", file=answers, flush=True)
    except BrokenPipeError:
        return 1  # nobody listens any more; the sink is closed
    except Exception as error:
        words = " ".join(str(error).split())
        print(f"failed {type(error).__name__}: {words}", file=answers, flush=True)
        raise
    return 0


def main() -> None:
    """The library's standard output goes where its errors go; the answers keep the pipe."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    code = serve(sys.argv[1], sys.stdin, answers)
    sys.stdout.flush()
    raise SystemExit(code)


if __name__ == "__main__":
    main()
