"""The launch files of a Ray job, submitted to a Ray cluster: the run ends as under `rlflow run`, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlflow.cli import main

ENVIRONMENT = os.environ | {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",  # of this cluster alone, whatever the user's clusters have
    "RAY_AUTH_TOKEN": uuid.uuid4().hex,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
ENVIRONMENT.pop("RAY_ADDRESS", None)
NOT_YET = ("No available agent", "Failed to connect to Ray")
"""What a submission says while a cluster is still starting."""


def free_ports(number: int) -> list[int]:
    """Below the range from which the system, and so Ray's other parts, take ports."""
    found: list[int] = []
    while len(found) < number:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("0.0.0.0", port))
            found.append(port)
    return found


@pytest.fixture
def cluster() -> Iterator[str]:
    """A Ray cluster with a dashboard, beside whatever else runs on this machine: the dashboard's address."""
    pytest.importorskip("ray")
    folder = Path(tempfile.mkdtemp(prefix="rlflow-ray-", dir="/tmp"))  # names of sockets must be short
    gcs, dashboard, agent = free_ports(3)
    command = ["ray", "start", "--head", "--block", "--num-cpus=2", f"--temp-dir={folder}", f"--port={gcs}"]
    command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while "Ray runtime started" not in (folder / "log").read_text("utf-8"):
            started = process.poll() is None and time.monotonic() < until
            assert started, (folder / "log").read_text("utf-8")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{dashboard}"
        process.terminate()
        assert process.wait(60) in (0, 1, -signal.SIGTERM, 128 + signal.SIGTERM), (folder / "log").read_text("utf-8")
        until = time.monotonic() + 20
        while left := processes(str(folder)):
            assert time.monotonic() < until, f"Ray has left {left}"
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            process.kill()
        for pid in processes(str(folder)):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def processes(folder: str) -> list[int]:
    """Of the Ray whose temporary folder it is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if folder in line:
            found.append(int(path.parent.name))
    return found


def submitted(address: str, command: list[str]) -> str:
    """The log of a job that must succeed."""
    until = time.monotonic() + 90
    environment = ENVIRONMENT | {"RAY_API_SERVER_ADDRESS": address}
    while True:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200
        )
        if not any(words in done.stdout for words in NOT_YET) or time.monotonic() > until:
            assert done.returncode == 0, done.stdout
            return done.stdout
        time.sleep(0.5)


def rlflow(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0


@pytest.mark.ray
@pytest.mark.slow
def test_a_submitted_job_trains_to_the_end(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rlflow("init", "flow")
    flow = tmp_path / "flow" / "grpo.rlflow"
    flow.write_text(flow.read_text("utf-8").replace("stop after 500 steps", "stop after 2 steps"), "utf-8")
    small = ("--set", "group=4", "--set", "batch.count=4")
    rlflow("emit", str(flow), "--target", "ray-job", "-o", "launch", "--run-dir", str(tmp_path / "run"), *small)
    rlflow("emit", str(flow), "--target", "kuberay", "--image", "x", "-o", "pods", *small)

    # The working directory as KubeRay's submitter names it: a zip, which lies where a ConfigMap is mounted.
    environment = json.dumps({"working_dir": f"file://{tmp_path}/pods/job.zip"})
    log = submitted(cluster, ["ray", "job", "submit", "--runtime-env-json", environment, "--", "ls", "-R"])
    assert {"plan.json", "run.sh", "grpo.rlflow", "rewards.py", "arithmetic.jsonl"} <= set(log.split())

    log = submitted(cluster, ["bash", "launch/submit.sh"])
    assert "2 steps; run folder:" in log
    status = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
    assert (status["status"], status["steps"]) == ("finished", 2)
    assert (tmp_path / "run" / "checkpoints" / "global_step_2" / "state.json").is_file()
    assert json.loads((tmp_path / "run" / "plan.json").read_text("utf-8"))["sources"][0]["path"] == "grpo.rlflow"
