"""Memory, shared memory, disk, limits."""

from __future__ import annotations

import re

from rlflow.amounts import size
from rlflow.backends.ray_runtime.doctor import npu_checks
from rlflow.backends.ray_runtime.doctor.environment import Environment
from rlflow.backends.ray_runtime.doctor.findings import Found, not_applicable, ok, problem, warning

GIB = 2**30
OBJECT_STORE_SHARE = 0.3
"""Of a host's memory, which Ray takes for its object store by default."""
OBJECT_STORE_MOST = 200 * 10**9
SMALL_SHM = GIB
LITTLE_MEMORY = 4 * GIB
LITTLE_DISK = 20 * GIB
FULL_DISK = 0.05
"""Free share below which Ray stops storing objects on a disk."""
FILES = (4096, 65536)
"""Open files: what some 50 workers need, and what Ray recommends."""


def memory(machine: Environment) -> tuple[int, int] | None:
    """Bytes in all and available, of the host or of the container that this is."""
    facts: dict[str, str] = dict(re.findall(r"^(\w+):\s+(\d+) kB", machine.text("/proc/meminfo") or "", re.MULTILINE))
    if "MemTotal" not in facts:
        return None
    total = int(facts["MemTotal"]) * 1024
    available = int(facts.get("MemAvailable", facts["MemTotal"])) * 1024
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit = (machine.text(limit_file) or "").strip()
        if limit.isdecimal() and int(limit) < total:
            total = int(limit)
            used = (machine.text(used_file) or "0").strip()
            available = min(available, total - int(used if used.isdecimal() else 0))
    return total, max(available, 0)


def check_memory(machine: Environment) -> Found:
    found = memory(machine)
    if found is None:
        return not_applicable("/proc/meminfo cannot be read")
    total, available = found
    shown, wanted = f"{size(available)} of {size(total)} are free", f"at least {size(LITTLE_MEMORY)}"
    if available < LITTLE_MEMORY:
        return warning(shown, wanted, "end other programs: Ray kills workers when 95 % are in use")
    return ok(shown, wanted)


def check_shm(machine: Environment) -> Found:
    found, host = machine.disk("/dev/shm"), memory(machine)
    if found is None or host is None:
        return not_applicable("there is no /dev/shm")
    store = min(int(host[0] * OBJECT_STORE_SHARE), OBJECT_STORE_MOST)
    shown, wanted = f"/dev/shm has {size(found[0])}", f"{size(store)}, the size of Ray's object store"
    fix = f"in a container: `--shm-size={-(-store // GIB)}g`, on Kubernetes an emptyDir of medium Memory at /dev/shm"
    if found[0] < min(SMALL_SHM, store):
        return problem(shown, wanted, fix)
    if found[0] < store:
        return warning(f"{shown}: beyond that Ray uses files, slowly", wanted, fix)
    return ok(shown, wanted)


def check_disk(machine: Environment) -> Found:
    """Of Ray's temporary folder and of the working folder, where runs are written."""
    places = dict.fromkeys([machine.variables.get("RAY_TMPDIR") or "/tmp", machine.variables.get("PWD") or "."])
    worst = None
    shown = []
    for place in places:
        found = machine.disk(place)
        if found is None:
            continue
        total, free = found
        shown.append(f"{size(free)} free at {place}")
        wanted = f"{size(LITTLE_DISK)}, and {FULL_DISK:.0%} of the disk"
        if free < total * FULL_DISK:
            return problem(
                f"{size(free)} of {size(total)} free at {place}: Ray stores no more objects there",
                wanted,
                "free some, or put Ray's files elsewhere: `export RAY_TMPDIR=/larger/disk`",
            )
        if free < LITTLE_DISK:
            worst = warning(
                f"{size(free)} free at {place}", wanted, "checkpoints and spilled objects may fill it: free some"
            )
    if not shown:
        return not_applicable("no disk can be looked at")
    return worst or ok(", ".join(shown), f"at least {size(LITTLE_DISK)}")


def check_limits(machine: Environment) -> Found:
    files, locked = machine.limit("nofile"), machine.limit("memlock")
    shown = f"{'unlimited' if files is None else files} open files"
    wanted = f"{FILES[1]} open files"
    fix = f"ulimit -n {FILES[1]} before Ray is started, or a line in /etc/security/limits.conf"
    if files is not None and files < FILES[0]:
        return problem(shown, wanted, fix)
    if files is not None and files < FILES[1]:
        return warning(f"{shown}: enough for one host, not for a large cluster", wanted, fix)
    has_devices = npu_checks.devices(machine) or machine.paths("/dev/nvidia[0-9]*")
    if has_devices and locked is not None and locked < GIB:
        return warning(
            f"{shown}, {size(locked)} of locked memory",
            "unlimited: swaps go through pinned host memory, and RDMA needs it",
            "ulimit -l unlimited, in a container `--ulimit memlock=-1`",
        )
    return ok(shown, wanted)
