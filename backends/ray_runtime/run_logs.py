"""What a process of a run writes, in a file of its own, every line with the time and who it comes from.

2026-11-30 22:45:19.120 INFO rollout/0 step 3 run:samples rlflow: ...      a record of Python's logging
2026-11-30 22:45:19.121 print reward exact worker 1 sample 2 of the prompt with uid 7: ...     what user code prints

Standard output and error are tagged where Python writes them; what C code writes to the descriptors, such as the
traceback of a crash, is in the same file as it is. Warnings are records of the logger `py.warnings`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rlflow.diagnostics.diagnostic import RunFailure

LOGS = "logs"
"""The folder of a run."""

logger = logging.getLogger("rlflow")


def rank_log(run_dir: Path, pool: str, rank: int) -> Path:
    return run_dir / LOGS / f"{pool}-{rank}.log"


def reward_log(run_dir: Path, name: str, pool: str, rank: int, worker: int) -> Path:
    """Of one worker of a reward that a rank calls."""
    return run_dir / LOGS / f"reward-{name}-{pool}-{rank}-{worker}.log"


def told(failure: RunFailure, log: Path) -> RunFailure:
    """The failure with the file in which there may be more about it; it is written there itself."""
    words = f"{failure.code}: {failure.message}"
    for note in failure.notes:
        words += f"\n  {note}"
    logger.error("%s", f"{words}\n{failure.trace}" if failure.trace else words)
    return RunFailure(
        failure.code,
        failure.message,
        stage=failure.stage,
        notes=failure.notes,
        help=(*failure.help, f"what the process wrote is in {log}"),
        trace=failure.trace,
    )


class Whereabouts:
    """Who writes, and what it does just now. Set by one thread, read by all."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.doing = ""
        """`step 3 run:samples`, say."""

    def __str__(self) -> str:
        return f"{self.who} {self.doing}" if self.doing else self.who


_here = Whereabouts("")


def doing(words: str) -> None:
    """What this process begins to do."""
    _here.doing = words


class Tagged(io.TextIOBase):
    """A text stream that puts a stamp before every line. Lines of several threads stay whole."""

    encoding = "utf-8"

    def __init__(
        self, target: Callable[[str], object], kind: str, where: Whereabouts, descriptor: int | None = None
    ) -> None:
        """`target` writes a whole line; `descriptor`: for who asks for the file behind the stream."""
        self._target, self._kind, self._where, self._descriptor = target, kind, where, descriptor
        self._lock = threading.RLock()
        self._parts: dict[int, str] = {}
        """Thread to the line that it has begun."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return super().fileno() if self._descriptor is None else self._descriptor

    @property
    def buffer(self) -> io.FileIO:
        """For bytes, which go to the file as they are."""
        return io.FileIO(self.fileno(), "w", closefd=False)

    def write(self, text: str) -> int:
        with self._lock:
            lines = (self._parts.pop(threading.get_ident(), "") + text).split("\n")
            if lines[-1]:
                self._parts[threading.get_ident()] = lines[-1]
            for line in lines[:-1]:
                self._target(f"{_stamp(time.time())} {self._kind} {self._where}: {line}\n")
        return len(text)

    def flush(self) -> None:
        """Lines are written when they end; the rest of one when the process does."""

    def finish(self) -> None:
        """Write the lines that have not been ended."""
        with self._lock:
            rest, self._parts = self._parts, {}
            for line in rest.values():
                self._target(f"{_stamp(time.time())} {self._kind} {self._where}: {line}\n")


class _Formatter(logging.Formatter):
    def __init__(self, where: Whereabouts) -> None:
        super().__init__()
        self._where = where

    def format(self, record: logging.LogRecord) -> str:
        words = record.getMessage().rstrip("\n")
        if record.exc_info:
            words += "\n" + self.formatException(record.exc_info)
        return f"{_stamp(record.created)} {record.levelname} {self._where} {record.name}: {words}"


def log_to(path: Path, who: str) -> None:
    """From now on everything that this process writes goes to the end of `path`, told to come from `who`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(2)
    _here.who, _here.doing = who, ""

    def write(line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: what is printed is no reason to end a run
            os.write(descriptor, line.encode("utf-8", errors="replace"))

    sys.stdout, sys.stderr = Tagged(write, "print", _here, 1), Tagged(write, "stderr", _here, 2)
    atexit.register(sys.stdout.finish)
    atexit.register(sys.stderr.finish)
    handler = logging.StreamHandler(_Raw(write))
    handler.setFormatter(_Formatter(_here))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(min(root.level or logging.WARNING, logging.WARNING))
    logger.setLevel(logging.INFO)
    logging.captureWarnings(True)


class _Raw(io.TextIOBase):
    """A stream whose texts are whole lines with a stamp already."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def write(self, text: str) -> int:
        self._write(text)
        return len(text)


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) + f".{int(seconds * 1000) % 1000:03d}"
