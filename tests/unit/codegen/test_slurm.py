"""The batch script, run by bash between stand-ins for Slurm, Ray and rlflow that write down how they are called."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rlflow.backends.codegen.write import write_files
from rlflow.diagnostics import RunFailure

RECORD = 'echo "$(basename "$0") $*" >> "$CALLS"\n'
STAND_INS = {
    "getent": 'echo "127.0.1.1 STREAM n0"; echo "10.0.0.1 STREAM"; echo "10.0.0.1 DGRAM"',
    "scontrol": 'printf "%s\\n" $FAKE_HOSTS',
    "srun": RECORD + 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "ray": 'trap "echo ray-ended >> $CALLS; exit" TERM\n' + RECORD + "while :; do sleep 0.1; done",
    "rlflow": RECORD
    + "if [[ $1 == doctor ]]; then\n"
    + '  [[ $FAKE_HOSTS == *" "* ]] && expected=2 || expected=1\n'
    + '  until (($(grep -c "^ray start" "$CALLS") == expected)); do sleep 0.05; done; exit "${DOCTOR:-0}"\nfi\n'
    + 'trap "sleep 0.3; echo saved >> $CALLS; exit 130" TERM; echo started > "$CALLS.started"\n'
    + 'n=0; while ((n++ < ${TENTHS:-0})); do sleep 0.1; done; exit "${CODE:-0}"',
}
"""Programs on the PATH of the script. `ray` and `rlflow` end like the real ones when they are told to."""
OUTPUT = ["job.sbatch", "submit.sh", "job/run.sh"]


@pytest.fixture
def slurm(tmp_path: Path, project: Any, emitted: Any) -> Any:
    """Starts the batch script of a plan for 4 hosts: (process, folder, file of calls)."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in STAND_INS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n", "utf-8")
        (programs / name).chmod(0o755)
    folder, calls = tmp_path / "out", tmp_path / "calls"
    write_files(folder, emitted(project(), "slurm", name="grpo", time="1-12"))

    def start(hosts: str = "n0 n1 n2 n3", **variables: str) -> subprocess.Popen[str]:
        # Slurm runs a copy of the script from a folder of its own.
        script = shutil.copy(folder / "job.sbatch", tmp_path / "slurm_script")
        environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_NODELIST": "n[0-3]",
            "SLURM_JOB_ID": "4711",
            "FAKE_HOSTS": hosts,
            "CALLS": str(calls),
            **variables,
        }
        return subprocess.Popen(["bash", script], env=environment, text=True, stderr=subprocess.PIPE)

    return start, folder, calls


def ended(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=30)
    return process.returncode


def test_ray_on_all_hosts_then_the_run_then_nothing(slurm: Any) -> None:
    start, folder, calls = slurm
    assert ended(start()) == 0
    lines = calls.read_text("utf-8").splitlines()
    options = '--num-cpus=192 --resources={"NPU": 8} --disable-usage-stats --block'
    assert f"ray start --head --node-ip-address=10.0.0.1 --port=24711 --include-dashboard=false {options}" in lines
    assert f"ray start --address=10.0.0.1:24711 {options}" in lines
    (srun,) = (line for line in lines if line.startswith("srun"))
    assert "--nodes=3 --ntasks=3 --ntasks-per-node=1 --cpu-bind=none --exclude=n0 --gres=npu:8 ray start" in srun
    assert "rlflow doctor job/plan.json --address 10.0.0.1:24711 --wait 300" in lines
    assert f"rlflow run plan.json --run-dir {folder}/runs/grpo --plain" in lines
    assert lines[-2:] == ["ray-ended", "ray-ended"]


def test_one_host_needs_no_others(slurm: Any) -> None:
    start, _, calls = slurm
    assert ended(start("n0")) == 0
    assert "srun" not in calls.read_text("utf-8")


def test_the_exit_code_is_that_of_the_run(slurm: Any) -> None:
    start, _, calls = slurm
    assert ended(start(CODE="7")) == 7
    assert calls.read_text("utf-8").endswith("ray-ended\nray-ended\n")


def test_no_run_on_a_cluster_that_lacks_something(slurm: Any) -> None:
    start, _, calls = slurm
    assert ended(start(DOCTOR="1")) == 1
    assert "rlflow run" not in calls.read_text("utf-8")
    assert calls.read_text("utf-8").endswith("ray-ended\nray-ended\n")


def test_the_run_writes_its_checkpoint_before_the_time_is_over(slurm: Any) -> None:
    """Slurm sends TERM to the script alone."""
    start, _, calls = slurm
    process = start(TENTHS="200")
    until = time.monotonic() + 20
    while not Path(f"{calls}.started").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 130
    assert calls.read_text("utf-8").splitlines()[-3:] == ["saved", "ray-ended", "ray-ended"]


def test_a_run_with_a_checkpoint_goes_on(slurm: Any) -> None:
    start, folder, calls = slurm
    checkpoint = folder / "elsewhere [1]" / "checkpoints" / "global_step_3"
    checkpoint.mkdir(parents=True)
    assert ended(start(RLFLOW_RUN_DIR=str(folder / "elsewhere [1]"))) == 0
    assert f"rlflow run --resume {folder}/elsewhere [1] --plain" in calls.read_text("utf-8").splitlines()


def test_submitted_from_elsewhere(slurm: Any, tmp_path: Path) -> None:
    start, _, calls = slurm
    process = start(SLURM_SUBMIT_DIR=str(tmp_path))
    assert "submit from the folder" in process.communicate(timeout=30)[1]
    assert process.returncode == 2
    assert not calls.exists()


def test_directives(project: Any, emitted: Any) -> None:
    """Slurm reads them up to the first command, and takes no variables in them."""
    text = emitted(project(), "slurm", name="g", partition="npu", account="team", time="90")["job.sbatch"].decode()
    head = text.partition("\nset -euo pipefail\n")[0]
    directives = [line.removeprefix("#SBATCH ") for line in head.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH" not in text.removeprefix(head)
    assert set(directives) >= {"--nodes=4", "--gres=npu:8", "--time=90", "--partition=npu", "--account=team"}
    assert all(line.startswith("#") for line in head.splitlines())
    assert not any("$" in line for line in directives)
    cpu = emitted(project(None), "slurm")["job.sbatch"].decode()
    assert "--gres" not in cpu
    assert "NPU" not in cpu


def test_cpus_that_the_cluster_does_not_state(project: Any, emitted: Any) -> None:
    path = project()
    path.write_text(path.read_text("utf-8").replace(" { memory = 1.5 TiB, cpus = 192 }", ""), "utf-8")
    text = emitted(path, "slurm")["job.sbatch"].decode()
    assert "--cpus-per-task" not in text
    assert "cpus=$(nproc)" in text
    assert "if ((cpus < 12)); then" in text, "8 ranks, and workers of the reward"


def test_hosts_of_two_types(project: Any, emitted: Any) -> None:
    schedule = """
schedule Async_GRPO on pod {
  pool rollout = 4 devices { device = h100 }
  pool learner = 16 devices { device = ascend_910b }
  place actor.generate         on rollout
  place actor.train, reference on learner
}
cluster pod { small = 4 * h100 large = 16 * ascend_910b }
"""
    with pytest.raises(RunFailure) as caught:
        emitted(project("", schedule=schedule), "slurm")
    assert caught.value.code == "RLF4012"
    assert set(caught.value.notes) == {"1 hosts with 4 x h100", "1 hosts with 16 x ascend_910b"}


@pytest.mark.parametrize("target", ["slurm", "ray-job", "kuberay"])
@pytest.mark.parametrize("run_dir", ["", '/x/it\'s $(touch made) `touch made` "y"; touch made #'])
def test_scripts_parse_and_quote(target: str, run_dir: str, project: Any, emitted: Any, tmp_path: Path) -> None:
    write_files(tmp_path / "out", emitted(project(), target, run_dir=run_dir))
    scripts = [tmp_path / "out" / name for name in OUTPUT if (tmp_path / "out" / name).exists()]
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", *map(str, scripts)], check=True)
    if run_dir:
        run = tmp_path / "out" / "job" / "run.sh"
        programs = tmp_path / "programs"
        programs.mkdir()
        (programs / "rlflow").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n', "utf-8")
        (programs / "rlflow").chmod(0o755)
        environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", str(run)], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == ["run", "plan.json", "--run-dir", run_dir, "--plain"]
        assert not list(tmp_path.rglob("made"))
