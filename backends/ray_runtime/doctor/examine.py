"""All checks in order. A check that fails itself is a result too, never a traceback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlflow.backends.ray_runtime.doctor import cluster_checks, host_checks, npu_checks, python_checks
from rlflow.backends.ray_runtime.doctor.cluster_checks import Cluster
from rlflow.backends.ray_runtime.doctor.environment import Environment
from rlflow.backends.ray_runtime.doctor.findings import Finding, Found, Status
from rlflow.plan import Plan


@dataclass(frozen=True)
class Subject:
    """What is examined. `cluster` None: none is named."""

    machine: Environment
    plan: Plan | None = None
    address: str = ""
    cluster: Cluster | None = None


CHECKS: dict[str, Callable[[Subject], Found]] = {
    "python": lambda s: python_checks.check_python(s.machine),
    "packages": lambda s: python_checks.check_packages(s.machine),
    "torch": lambda s: python_checks.check_torch(s.machine),
    "torch-npu": lambda s: python_checks.check_torch_npu(s.machine),
    "cann": lambda s: npu_checks.check_cann(s.machine),
    "npu-health": lambda s: npu_checks.check_npu_health(s.machine),
    "visible-npus": lambda s: npu_checks.check_visible_npus(s.machine),
    "visible-gpus": lambda s: npu_checks.check_visible_gpus(s.machine),
    "hccl": lambda s: npu_checks.check_hccl(s.machine, s.plan),
    "npu-allocator": lambda s: npu_checks.check_allocator(s.machine, s.plan),
    "memory": lambda s: host_checks.check_memory(s.machine),
    "shared-memory": lambda s: host_checks.check_shm(s.machine),
    "disk": lambda s: host_checks.check_disk(s.machine),
    "limits": lambda s: host_checks.check_limits(s.machine),
    "graphviz": lambda s: python_checks.check_graphviz(s.machine),
    "cluster": lambda s: cluster_checks.check_connection(s.cluster, s.address),
    "cluster-versions": lambda s: cluster_checks.check_versions(s.machine, s.cluster),
    "cluster-clocks": lambda s: cluster_checks.check_clocks(s.cluster),
    "cluster-shared-memory": lambda s: cluster_checks.check_cluster_shm(s.cluster),
    "plan-resources": lambda s: cluster_checks.check_plan_resources(s.machine, s.plan, s.cluster),
}
"""Name to check; names never change their meaning, since programs read them."""


def examine(machine: Environment, plan: Plan | None = None, address: str = "", wait_s: float = 0.0) -> list[Finding]:
    """The results of all checks. `address` "": no cluster; `wait_s`: how long it may take to have what a plan needs."""
    cluster = None
    if address:
        try:
            cluster = cluster_checks.ask(machine, address, wait_s, plan)
        except Exception as error:
            cluster = Cluster(error=f"asking it failed: {_words(error)}")
    subject = Subject(machine, plan, address, cluster)
    return [_examined(name, check, subject) for name, check in CHECKS.items()]


def _examined(name: str, check: Callable[[Subject], Found], subject: Subject) -> Finding:
    try:
        found = check(subject)
    except Exception as error:
        return Finding(name, Status.WARNING, f"the check itself failed: {_words(error)}", "", "please report this")
    return Finding(name, found.status, found.found, found.wanted, found.fix)


def _words(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
