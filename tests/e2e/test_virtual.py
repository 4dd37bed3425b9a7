"""`--device virtual` on Ray: a plan for 32 devices on whatever machine this is."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from rlflow.backends.simulator.run import Options, simulate
from rlflow.driver import load_plan
from rlflow.reports import report
from rlflow.runs import read_events, read_metrics, read_run_json

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "async_grpo.rlflow"
TIMES = {"samples": 1.0, "ref": 0.2, "actor.train": 0.5}
SPEED_UP = 2.0


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("virtual")
    shutil.copytree(EXAMPLE.parent / "data", folder / "data")
    shutil.copy(EXAMPLE.parent / "rewards.py", folder)
    shutil.copy(EXAMPLE, folder)
    return folder / EXAMPLE.name


def run(flow: Path, name: str, steps: int) -> tuple[int, Path]:
    """Exit code and run folder."""
    from rlflow.cli import main

    stated = [part for stage, seconds in TIMES.items() for part in ("--stage", f"{stage}={seconds}")]
    options = ["--device", "virtual", "--speed-up", str(SPEED_UP), "--ranks-per-worker", "16", "--steps", str(steps)]
    folder = flow.parent / name
    with pytest.raises(SystemExit) as end:
        main(["run", str(flow), *options, *stated, "--run-dir", str(folder)])
    assert isinstance(end.value.code, int)
    return end.value.code, folder


@pytest.fixture(scope="module")
def ran(flow: Path, ray_cluster: object) -> Path:
    code, folder = run(flow, "whole", 4)
    assert code == 0
    return folder


def test_the_run_folder_is_that_of_a_run(ran: Path) -> None:
    facts = read_run_json(ran)
    assert facts["status"] == "finished"
    assert facts["virtual"] == {
        "speed_up": SPEED_UP,
        "devices": 32,
        "workers": {"rollout": 1, "learner": 1},
        "payload_share": 1.0,
    }
    rows = read_metrics(ran / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["data"]["age/samples/max"] for row in rows] == [0, 1, 1, 1]
    assert all(row["data"]["perf/total_num_tokens"] > 0 for row in rows)
    assert (ran / "trace.json").is_file()
    assert "async_grpo" in report(ran)


def test_steps_take_the_simulated_time_and_no_less(ran: Path) -> None:
    """More on a busy machine, so that only the lower bound is sharp."""
    plan = load_plan(ran / "plan.json")
    simulated = float(simulate(plan, Options(stated=TIMES)).period) / 1e6
    ends = sorted(
        event["start_us"] + event["duration_us"]
        for event in read_events(ran)
        if event["pool"] == "learner" and event["kind"] == "publish"
    )
    periods = [(after - before) / 1e6 for before, after in itertools.pairwise(ends[1:])]
    assert min(periods) >= 0.9 * simulated
    assert min(periods) <= 3 * simulated


def test_weights_come_at_their_versions(ran: Path) -> None:
    events = list(read_events(ran))
    made = {e["step"]: e["version"] for e in events if e["stage"] == "samples" and e["kind"] == "run"}
    assert made == {1: 0, 2: 0, 3: 1, 4: 2}
    published = {e["step"]: e["start_us"] for e in events if e["kind"] == "publish"}
    begun = {e["step"]: e["start_us"] for e in events if e["stage"] == "samples" and e["kind"] == "run"}
    assert begun[4] > published[2]


def test_a_virtual_run_is_not_resumed(ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would begin to compute, in a folder that says it did not."""
    from rlflow.cli import main

    with pytest.raises(SystemExit) as end:
        main(["run", "--resume", str(ran)])
    assert end.value.code == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "error[RLF5010]: there is no checkpoint to resume from" in told
    assert "it is of a virtual run, which has no weights" in told
    assert read_run_json(ran)["status"] == "finished"


def test_ctrl_c_ends_all_pools_after_one_step(flow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(metrics: Path) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and not (metrics.is_file() and metrics.stat().st_size):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, args=(flow.parent / "stopped" / "metrics.jsonl",), daemon=True).start()
    code, folder = run(flow, "stopped", 500)
    assert code == 130
    assert "a virtual run is not resumed" in capsys.readouterr().err
    assert read_run_json(folder)["status"] == "interrupted"
    last = {event["pool"]: event["step"] for event in sorted(read_events(folder), key=lambda event: event["step"])}
    assert last["rollout"] == last["learner"] < 20
