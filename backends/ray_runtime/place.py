"""Where a rank is in its instruction list, told to whoever asks. No torch here: the driver reads it."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """The process of a rank."""

    host: str
    node: str
    """Ray's id of the host"""
    pid: int


@dataclass(frozen=True)
class Place:
    """What a rank does. `seconds`: for how long."""

    step: int
    instruction: str
    seconds: float
    cpu_s: float | None
    """What the thread that executes has computed so far; None where the system does not say."""
    host_memory_free: int | None
    """bytes"""

    def sentence(self) -> str:
        """`in `run:samples` of step 7 for 31 s`"""
        what = f"in `{self.instruction}` of step {self.step}" if self.instruction else "before its first instruction"
        return f"{what} for {self.seconds:.0f} s"


class PlaceNote:
    """Written by the thread that executes, at every instruction; read by another one."""

    def __init__(self) -> None:
        self._now = (0, "", time.monotonic())
        self._thread = 0

    def begin(self) -> None:
        """This thread executes from now on."""
        self._thread = threading.get_native_id()

    def at(self, step: int, instruction: str) -> None:
        """An instruction begins."""
        self._now = (step, instruction, time.monotonic())

    def read(self) -> Place:
        step, instruction, since = self._now
        return Place(step, instruction, time.monotonic() - since, self._cpu_s(), memory_free())

    def _cpu_s(self) -> float | None:
        try:
            fields = Path(f"/proc/self/task/{self._thread}/stat").read_text("utf-8").rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return None


def memory_free() -> int | None:
    """Bytes that processes of this host can still have; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration):
        return None
