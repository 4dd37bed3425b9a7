"""What this machine is."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from rlflow.profile.table import MachineFacts

_CPUINFO = Path("/proc/cpuinfo")
_NAMES = ("model name", "Model", "cpu model", "Processor")
"""Keys under which processors of different kinds give their name."""


def this_machine() -> MachineFacts:
    """Facts of the machine that this process runs on. They name no host and no user."""
    return MachineFacts(
        system=platform.system(),
        architecture=platform.machine(),
        processor=_processor(),
        cpus=os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
    )


def differences(measured: MachineFacts, here: MachineFacts) -> list[str]:
    """In words, what makes a time measured on one machine not hold on another; empty where it holds.

    Memory is not compared: it does not change how long a stage takes.
    """
    names = ("system", "architecture", "processor", "cpus")
    pairs = [(name, getattr(measured, name), getattr(here, name)) for name in names]
    return [f"{name}: {there} was measured, here is {mine}" for name, there, mine in pairs if there != mine]


def _processor() -> str:
    try:
        text = _CPUINFO.read_text("utf-8", errors="replace")
    except OSError:
        text = ""
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    named = next((found[name] for name in _NAMES if found.get(name)), "")
    return named or platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
