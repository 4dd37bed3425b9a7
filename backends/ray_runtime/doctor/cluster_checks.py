"""A Ray cluster: that it can be joined, that its hosts agree, and that it has what a plan needs."""

from __future__ import annotations

import json
from typing import Final

from pydantic import BaseModel, ConfigDict

from rlflow import __version__
from rlflow.amounts import size
from rlflow.backends.ray_runtime.doctor import npu_checks
from rlflow.backends.ray_runtime.doctor.environment import PYTHON, Environment
from rlflow.backends.ray_runtime.doctor.findings import Found, not_applicable, ok, problem, warning
from rlflow.backends.ray_runtime.doctor.host_checks import OBJECT_STORE_MOST
from rlflow.backends.ray_runtime.doctor.needs import Needs, needs
from rlflow.backends.ray_runtime.doctor.versions import release
from rlflow.plan import Plan

PROBE: Final = "rlflow.backends.ray_runtime.doctor.probe"
_NO_TOKEN = "InvalidAuthToken"
"""What Ray says when RAY_AUTH_MODE is not the same on both sides, or the token is another one."""
_JOIN_S = 150.0
"""For the probe beside what it waits for: Ray itself gives up after some time."""
CLOCK_S = (0.5, 5.0)
"""Clocks apart by so much: traces of hosts no longer line up; times in logs and files mislead."""


class Node(BaseModel):
    """A host of the cluster, as the probe writes it."""

    model_config = ConfigDict(extra="forbid")
    name: str
    resources: dict[str, float] = {}
    ray: str = ""
    python: str = ""
    torch: str = ""
    rlflow: str = ""
    rlflow_error: str = ""
    shm: int | None = None
    clock_s: float | None = None
    clock_error_s: float | None = None
    error: str = ""


class Cluster(BaseModel):
    """`error`: why it cannot be joined."""

    model_config = ConfigDict(extra="forbid")
    nodes: tuple[Node, ...] = ()
    error: str = ""


def ask(machine: Environment, address: str, wait_s: float, plan: Plan | None) -> Cluster:
    """The cluster at an address, waiting until it has what the plan needs."""
    if machine.installed("ray") is None:
        return Cluster(error="Ray is not installed here")
    wanted = needs(plan).resources if plan else {}
    ran = machine.run(PYTHON, "-m", PROBE, address, str(wait_s), json.dumps(wanted), seconds=wait_s + _JOIN_S)
    assert ran is not None
    if _NO_TOKEN in ran.output:
        return Cluster(error=f"it wants a token that this process does not have ({_NO_TOKEN})")
    lines = [line for line in ran.output.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("{"):
            return Cluster.model_validate_json(line)
    if ran.code == -1:
        return Cluster(error=f"no answer within {wait_s + _JOIN_S:.0f} s")
    return Cluster(error=lines[-1][:300] if lines else f"the program that joins it ended with code {ran.code}")


def check_connection(cluster: Cluster | None, address: str) -> Found:
    if cluster is None:
        return not_applicable("no cluster is named: `--address`, or RAY_ADDRESS")
    wanted = "a Ray cluster that can be joined"
    if _NO_TOKEN in cluster.error:
        return problem(
            f"no cluster at `{address}`: {cluster.error}",
            wanted,
            "`export RAY_AUTH_MODE=token` here, with RAY_AUTH_TOKEN as on the cluster's hosts",
        )
    if cluster.error:
        return problem(
            f"no cluster at `{address}`: {cluster.error}",
            wanted,
            "start it (`ray start --head`), or look at the address, the token, firewalls, and versions of Ray",
        )
    silent = [f"{node.name} ({node.error})" for node in cluster.nodes if node.error]
    if silent:
        return problem(f"no answer from {', '.join(silent)}", "every host answers", "look at the raylet's log there")
    return ok(f"{len(cluster.nodes)} hosts answer at `{address}`", wanted)


def check_versions(machine: Environment, cluster: Cluster | None) -> Found:
    """Ray takes only hosts of its own version; pickled values and random streams need the others equal too."""
    nodes = _answered(cluster)
    if not nodes:
        return not_applicable("no cluster that answers")
    here: dict[str, str | None] = {
        "ray": machine.installed("ray"),
        "python": machine.python,
        "torch": machine.installed("torch"),
        "rlflow": __version__,
    }
    wanted = "of Ray, Python, torch and rlflow the same version everywhere"
    for node in nodes:
        if not node.rlflow:
            return problem(
                f"rlflow is not there on {node.name}: {node.rlflow_error or 'not found'}",
                wanted,
                "install rlflow on every host, into the environment that Ray was started from",
            )
        for name, version in here.items():
            there = getattr(node, name)
            equal = release(there)[:2] == release(version or "")[:2] if name == "python" else there == (version or "")
            if not equal:
                return problem(
                    f"{name} {there or 'is missing'} on {node.name}, {version or 'none'} here",
                    wanted,
                    f"pip install the same {name} on all hosts" if name != "python" else "use one Python everywhere",
                )
    return ok(f"ray {here['ray']}, Python {here['python']}, rlflow {__version__} on all {len(nodes)} hosts", wanted)


def check_clocks(cluster: Cluster | None) -> Found:
    measured = [n for n in _answered(cluster) if n.clock_s is not None and n.clock_error_s is not None]
    if not measured:
        return not_applicable("no cluster that answers")
    apart = [(abs(node.clock_s or 0.0) - (node.clock_error_s or 0.0), node) for node in measured]
    least, worst = max(apart, key=lambda item: item[0])
    wanted = f"within {CLOCK_S[0]} s"
    shown = f"{worst.name} is {worst.clock_s or 0.0:+.3f} s (± {worst.clock_error_s or 0.0:.3f} s) from here"
    if least > CLOCK_S[1]:
        return problem(shown, wanted, "run a time service (chrony, ntpd) on every host")
    if least > CLOCK_S[0]:
        return warning(f"{shown}: traces of hosts do not line up", wanted, "run a time service on every host")
    return ok(shown, wanted)


def check_cluster_shm(cluster: Cluster | None) -> Found:
    """Ray's own figure of a host's object store against the host's /dev/shm."""
    known = [node for node in _answered(cluster) if node.shm is not None and "object_store_memory" in node.resources]
    if not known:
        return not_applicable("no cluster that answers")
    small = [n for n in known if (n.shm or 0) < min(n.resources["object_store_memory"], OBJECT_STORE_MOST)]
    if small:
        node = small[0]
        return warning(
            f"/dev/shm of {node.name} has {size(node.shm or 0)}",
            f"{size(int(node.resources['object_store_memory']))}, the size of Ray's object store there",
            "give the containers more: `--shm-size`, on Kubernetes an emptyDir of medium Memory at /dev/shm",
        )
    return ok(f"large enough on all {len(known)} hosts", "/dev/shm holds Ray's object store")


def check_plan_resources(machine: Environment, plan: Plan | None, cluster: Cluster | None) -> Found:
    """Against the cluster that is named, else against this machine, where a run would start a Ray of its own."""
    if plan is None:
        return not_applicable("no plan is given: `rlflow doctor plan.json`")
    if cluster is not None and not _answered(cluster):
        return not_applicable("no cluster that answers")
    wanted = needs(plan)
    if cluster is None:
        hosts = [_this_host(machine, wanted)]
        where = "this machine"
    else:
        hosts = [node.resources for node in _answered(cluster)]
        where = "the cluster"
    words = _words(wanted)
    for name, per_host in wanted.devices.items():
        have = sorted((int(host.get(name, 0)) for host in hosts), reverse=True)
        if sum(have) < sum(per_host):
            others = sorted({key for host in hosts for key in ("NPU", "GPU") if host.get(key)} - {name})
            note = f" (and {', '.join(others)}, which the plan is not for)" if others else ""
            return problem(
                f"{where} has {sum(have)} {name}{note}",
                words,
                "compile for the cluster that is there, or start Ray on more hosts"
                + (
                    f"; a host that does not find its own: `ray start --resources='{{\"{name}\": N}}'`"
                    if name == "NPU"
                    else ""
                ),
            )
        lacking = [
            (needed, there)
            for needed, there in zip(per_host, have + [0] * len(per_host), strict=False)
            if there < needed
        ]
        if lacking:
            return problem(
                f"{where} has {sum(have)} {name} in all, {', '.join(map(str, have))} by host; largest host {have[0]}",
                f"{words}: hosts with {', '.join(map(str, per_host))}",
                "a pool's model-parallel groups do not cross hosts: compile for hosts of that size",
            )
    cpus = sum(host.get("CPU", 0) for host in hosts)
    if cpus < wanted.ranks and cluster is not None:
        return problem(f"{where} has {cpus:g} CPUs", words, "start Ray with more (`--num-cpus`), or on more hosts")
    if cpus < wanted.ranks + wanted.workers:
        return warning(
            f"{where} has {cpus:g} CPUs",
            f"{words}, {wanted.ranks + wanted.workers} CPUs with the workers of Python functions",
            "they will share CPUs: expect rewards to take longer than planned",
        )
    return ok(f"{where} has " + ", ".join(_totals(hosts, wanted)), words)


def _this_host(machine: Environment, wanted: Needs) -> dict[str, float]:
    gpus = len(machine.paths("/dev/nvidia[0-9]*"))
    return {"CPU": machine.cpus, "NPU": npu_checks.devices(machine), "GPU": gpus}


def _words(wanted: Needs) -> str:
    devices = [f"{sum(hosts)} {name} on {len(hosts)} hosts" for name, hosts in wanted.devices.items()]
    return ", ".join([*devices, f"{wanted.ranks} CPUs for the ranks"])


def _totals(hosts: list[dict[str, float]], wanted: Needs) -> list[str]:
    return [f"{sum(host.get(name, 0) for host in hosts):g} {name}" for name in ("CPU", *wanted.devices)]


def _answered(cluster: Cluster | None) -> list[Node]:
    return [] if cluster is None else [node for node in cluster.nodes if not node.error]
