"""Checks of a Ray cluster: on recorded answers of the probe, and once on a real one."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlflow import __version__, driver
from rlflow.backends.ray_runtime.doctor.cluster_checks import PROBE
from rlflow.backends.ray_runtime.doctor.environment import Ran, ThisMachine
from rlflow.backends.ray_runtime.doctor.examine import examine
from rlflow.backends.ray_runtime.doctor.findings import Finding
from rlflow.cli import main

GIB = 2**30


def node(name: str = "10.0.0.1", **changes: Any) -> dict[str, Any]:
    resources = {"CPU": 192.0, "NPU": 8.0, "object_store_memory": 186.0 * GIB} | changes.pop("resources", {})
    return {
        "name": name,
        "resources": resources,
        "ray": "2.60.0",
        "python": "3.11.2",
        "torch": "2.13.0+cpu",
        "rlflow": __version__,
        "shm": 768 * GIB,
        "clock_s": 0.002,
        "clock_error_s": 0.001,
    } | changes


@pytest.fixture
def found(recorded: Any) -> Any:
    """The finding of one check, with a cluster of these nodes, or with what the probe wrote instead."""

    def one(check: str, *nodes: dict[str, Any], plan: Any = None, ran: Ran | None = None) -> Finding:
        answer = ran or Ran(0, "a warning of Ray\n" + json.dumps({"nodes": nodes}) + "\n")
        machine = recorded.changed(recorded.NPU_HOST, programs={PROBE: answer})
        (finding,) = [f for f in examine(machine, plan, "10.0.0.1:6379") if f.check == check]
        return finding

    return one


def test_a_cluster_that_is_well(found: Any) -> None:
    hosts = [node(f"10.0.0.{i}") for i in range(4)]
    assert found("cluster", *hosts).found == "4 hosts answer at `10.0.0.1:6379`"
    for check in ("cluster-versions", "cluster-clocks", "cluster-shared-memory"):
        assert found(check, *hosts).status == "ok"


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        (Ran(0, '{"error": "ConnectionError: nobody at 10.0.0.1"}\n'), "nobody at 10.0.0.1"),
        (Ran(-6, "C++ stack\nCheck failed: GCS is gone\n"), "GCS is gone"),
        (Ran(1, ""), "ended with code 1"),
        (Ran(0, 'gcs: Unauthenticated: InvalidAuthToken: missing\n{"error": "ConnectionError"}\n'), "it wants a token"),
        (Ran(-1, ""), "no answer within 150 s"),
        (Ran(0, '{"nodes": 3}\n'), "asking it failed: ValidationError"),
    ],
)
def test_a_cluster_that_cannot_be_joined(ran: Ran, words: str, found: Any, plan_for: Any) -> None:
    finding = found("cluster", ran=ran)
    assert finding.status == "problem"
    assert words in finding.found
    for check in ("cluster-versions", "cluster-clocks", "plan-resources"):
        assert found(check, ran=ran, plan=plan_for(8)).status == "not applicable"


def test_a_host_that_does_not_answer(found: Any) -> None:
    silent = {"name": "10.0.0.9", "resources": {"NPU": 8.0}, "error": "GetTimeoutError: no answer"}
    finding = found("cluster", node(), silent)
    assert (finding.status, finding.found) == ("problem", "no answer from 10.0.0.9 (GetTimeoutError: no answer)")
    assert found("cluster-versions", node(), silent).status == "ok"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ray": "2.59.0"}, "ray 2.59.0 on 10.0.0.2, 2.60.0 here"),
        ({"python": "3.12.1"}, "python 3.12.1 on 10.0.0.2, 3.11.9 here"),
        ({"torch": ""}, "torch is missing on 10.0.0.2, 2.13.0+cpu here"),
        ({"rlflow": "9.9"}, f"rlflow 9.9 on 10.0.0.2, {__version__} here"),
        (
            {"rlflow": "", "rlflow_error": "ModuleNotFoundError: No module named 'rlflow'"},
            "rlflow is not there on 10.0.0.2: ModuleNotFoundError: No module named 'rlflow'",
        ),
    ],
)
def test_hosts_of_other_versions(changes: dict[str, str], words: str, found: Any) -> None:
    finding = found("cluster-versions", node(), node("10.0.0.2", **changes))
    assert (finding.status, finding.found) == ("problem", words)


@pytest.mark.parametrize(
    ("clock", "error", "status"),
    [(0.4, 0.01, "ok"), (-0.9, 0.01, "warning"), (0.9, 0.6, "ok"), (7.0, 0.5, "problem"), (-3600.0, 1.0, "problem")],
)
def test_clocks(clock: float, error: float, status: str, found: Any) -> None:
    """Only what the time of the answer cannot explain counts."""
    finding = found("cluster-clocks", node(), node("10.0.0.2", clock_s=clock, clock_error_s=error))
    assert finding.status == status
    if status != "ok":
        assert finding.found.startswith(f"10.0.0.2 is {clock:+.3f} s (± {error:.3f} s) from here")


def test_shared_memory_of_the_hosts(found: Any) -> None:
    finding = found("cluster-shared-memory", node(), node("10.0.0.2", shm=64 * 2**20))
    assert (finding.status, finding.found) == ("warning", "/dev/shm of 10.0.0.2 has 64.0 MiB")


# --- what a plan needs -----------------------------------------------------------------------------------------------


def test_a_plan_and_its_cluster(found: Any, plan_for: Any) -> None:
    plan = plan_for(32)
    hosts = [node(f"10.0.0.{i}") for i in range(4)]
    finding = found("plan-resources", *hosts, plan=plan)
    assert (finding.status, finding.found) == ("ok", "the cluster has 768 CPU, 32 NPU")
    assert finding.wanted == "32 NPU on 4 hosts, 32 CPUs for the ranks"
    few = found("plan-resources", *hosts[:3], plan=plan)
    assert (few.status, few.found) == ("problem", "the cluster has 24 NPU")


def test_the_total_fits_and_no_host_does(found: Any, plan_for: Any) -> None:
    finding = found("plan-resources", *[node(f"h{i}", resources={"NPU": 4.0}) for i in range(2)], plan=plan_for(8))
    assert finding.status == "problem"
    assert finding.found == "the cluster has 8 NPU in all, 4, 4 by host; largest host 4"
    assert "hosts with 8" in finding.wanted


def test_other_devices_than_the_plan_is_for(found: Any, plan_for: Any) -> None:
    gpus = node(resources={"NPU": 0.0, "GPU": 8.0})
    assert found("plan-resources", gpus, plan=plan_for(8)).found == (
        "the cluster has 0 NPU (and GPU, which the plan is not for)"
    )


def test_cpus(found: Any, plan_for: Any) -> None:
    assert found("plan-resources", node(resources={"CPU": 4.0}), plan=plan_for(8)).status == "problem"
    assert found("plan-resources", node(resources={"CPU": 8.0}), plan=plan_for(8)).status == "warning"


def test_a_plan_on_this_machine(recorded: Any, plan_for: Any) -> None:
    for devices, status in ((8, "ok"), (16, "problem")):
        (finding,) = [f for f in examine(recorded.NPU_HOST, plan_for(devices)) if f.check == "plan-resources"]
        assert finding.status == status
    assert finding.found == "this machine has 8 NPU"


# --- the command, and real machines ----------------------------------------------------------------------------------


def test_this_machine_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine is: every check gives a result, and the exit code says whether there is a problem."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--format", "json"])
    findings = json.loads(capsys.readouterr().out)
    assert all(set(finding) == {"check", "status", "found", "wanted", "fix"} for finding in findings)
    assert not [finding for finding in findings if "the check itself failed" in finding["found"]]
    assert ended.value.code == int(any(finding["status"] == "problem" for finding in findings))
    by_name = {finding["check"]: finding for finding in findings}
    assert by_name["memory"]["status"] in ("ok", "warning")
    assert by_name["plan-resources"]["status"] == "not applicable"


def test_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, recorded: Any) -> None:
    from rlflow.commands.doctor import lines

    shown = lines(
        examine(recorded.changed(recorded.NPU_HOST, python="3.10.0", limits={"nofile": 9000, "memlock": None}))
    )
    assert "PROBLEM  python                 Python 3.10.0" in shown
    assert "                                wanted: >=3.11" in shown
    assert any(line.startswith("warning  limits") for line in shown)
    assert shown[-1] == "20 checks: 12 ok, 1 warnings, 1 problems, 6 not applicable"


@pytest.mark.parametrize("arguments", [["--wait", "5"], ["--set", "a=1"], ["--cluster", "pod"]])
def test_options_without_what_they_are_for(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2


@pytest.mark.ray
def test_a_real_cluster(ray_cluster: Any, plan_for: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe joins from a process of its own, answers for every host, and leaves the cluster as it was."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    address = ray_cluster.get_runtime_context().gcs_address
    machine = ThisMachine(variables=dict(os.environ))
    findings = {f.check: f for f in examine(machine, plan_for(8), address)}
    assert findings["cluster"].found == f"1 hosts answer at `{address}`"
    assert findings["cluster-versions"].status == "ok", findings["cluster-versions"].found
    assert findings["cluster-clocks"].status == "ok", findings["cluster-clocks"].found
    assert findings["plan-resources"].found == "the cluster has 0 NPU"
    assert ray_cluster.cluster_resources()["CPU"] == 4
    assert sys.modules.get("ray") is ray_cluster


def test_an_address_where_nothing_is(plan_for: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once: Ray itself would try for minutes."""
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{free.getsockname()[1]}"
        started = time.monotonic()
        findings = {f.check: f for f in examine(ThisMachine(variables=dict(os.environ)), plan_for(8), address)}
    assert findings["cluster"].status == "problem"
    assert "nothing listens there" in findings["cluster"].found
    assert findings["plan-resources"].status == "not applicable"
    assert time.monotonic() - started < 60


@pytest.mark.ray
def test_the_wait_is_for_what_the_plan_needs(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that has it does not keep anybody waiting."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    plan = driver.compile(Path(__file__).parents[3] / "examples" / "grpo_arithmetic.rlflow")
    address = ray_cluster.get_runtime_context().gcs_address
    findings = {f.check: f for f in examine(ThisMachine(variables=dict(os.environ)), plan, address, wait_s=120)}
    assert findings["plan-resources"].status == "ok", findings["plan-resources"]
