"""What the checks may look at. The real machine, or in tests a recorded one: no check reads anything past this."""

from __future__ import annotations

import glob
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Protocol

PYTHON = "python"
"""As the first word of a command: the interpreter that rlflow runs in."""
DISTRIBUTION = "rlflow-dsl"
COMMAND_S = 180.0
"""torch takes long to be imported from a cold network disk."""


@dataclass(frozen=True)
class Ran:
    """How a command ended; `code` -1 when it did not end in time. `output`: both streams."""

    code: int
    output: str


class Environment(Protocol):
    """A machine as seen from the process that would start a run."""

    @property
    def variables(self) -> Mapping[str, str]: ...

    @property
    def python(self) -> str:
        """Version."""

    @property
    def cpus(self) -> int: ...

    def installed(self, package: str) -> str | None:
        """Version of a distribution; None when it is not installed."""

    def requirements(self) -> tuple[str, tuple[str, ...]] | None:
        """What rlflow declares: the range of Python, and its requirements; None when it is no installed package."""

    def run(self, *command: str, seconds: float = COMMAND_S) -> Ran | None:
        """None when there is no such program."""

    def text(self, path: str) -> str | None:
        """None when there is no such file, or it cannot be read."""

    def paths(self, pattern: str) -> list[str]:
        """Of a glob."""

    def disk(self, path: str) -> tuple[int, int] | None:
        """Bytes in all and free, of the file system; None when there is none."""

    def limit(self, name: str) -> int | None:
        """The soft limit `nofile` (files) or `memlock` (bytes); None = unlimited."""


@dataclass(frozen=True)
class ThisMachine:
    """The real one."""

    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = field(default_factory=platform.python_version)
    cpus: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def installed(self, package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    def requirements(self) -> tuple[str, tuple[str, ...]] | None:
        try:
            found = metadata.distribution(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            return None
        return found.metadata["Requires-Python"] or "", tuple(found.requires or ())

    def run(self, *command: str, seconds: float = COMMAND_S) -> Ran | None:
        program = sys.executable if command[0] == PYTHON else shutil.which(command[0], path=self.variables.get("PATH"))
        if program is None:
            return None
        try:
            done = subprocess.run(
                [program, *command[1:]],
                env=dict(self.variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            return Ran(-1, (late.stdout or b"").decode(errors="replace"))
        return Ran(done.returncode, done.stdout.decode(errors="replace"))

    def text(self, path: str) -> str | None:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return None

    def paths(self, pattern: str) -> list[str]:
        return sorted(glob.glob(pattern))

    def disk(self, path: str) -> tuple[int, int] | None:
        try:
            found = shutil.disk_usage(path)
        except OSError:
            return None
        return found.total, found.free

    def limit(self, name: str) -> int | None:
        number = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}[name]
        soft, _ = resource.getrlimit(number)
        return None if soft == resource.RLIM_INFINITY else soft
