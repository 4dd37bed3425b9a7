"""Ctrl-C, SIGTERM and kill -9, as a user or a scheduler sends them to `rlflow run`."""

from __future__ import annotations

import json
import os
import pty
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

Start = Callable[..., Any]

SLOW_REWARDS = """\
import time


def score(response):
    time.sleep(%g)
    return float(len(set(response)))
"""


@pytest.fixture
def endless(project: Any) -> Any:
    """A run that takes a while: 16 samples a step, scored one after the other."""
    project.edit("stop after 4 steps", "stop after 4000 steps")
    project.edit("held every 2 steps", "held")
    project.edit("  save every 2 steps\n", "")
    project.rewards(SLOW_REWARDS % 0.02)
    return project


@pytest.fixture
def address(ray_cluster: Any) -> str:
    """The session's Ray, so that not every command starts one."""
    found: str = ray_cluster.get_runtime_context().gcs_address
    return found


def steps_of(folder: Path) -> list[int]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row["step"] for row in rows if "training/global_step" in row["data"]]


def test_ctrl_c_on_a_terminal(endless: Any, command: Start, has_ended: Callable[[int], bool], ray_cluster: Any) -> None:
    """The step is finished and saved, the way to go on is shown and works, and no process is left."""
    master, slave = pty.openpty()
    run = command("run", "sums.rlflow", "--run-dir", "run", stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    os.set_blocking(master, False)
    screen = b""

    def read() -> bool:
        nonlocal screen
        try:
            screen += os.read(master, 1 << 16)
        except OSError:
            pass
        return (endless.root / "run" / "metrics.jsonl").is_file() and len(steps_of(endless.root / "run")) >= 2

    run.until(read)
    children = run.descendants()
    assert len(children) > 4
    run.signal(signal.SIGINT)
    deadline = time.monotonic() + 60
    while run.process.poll() is None and time.monotonic() < deadline:
        read()
        time.sleep(0.05)
    read()
    os.close(master)
    text = screen.decode("utf-8", errors="replace")
    assert run.process.poll() == 130, text
    done = steps_of(endless.root / "run")
    assert f"stopped after step {done[-1]} of 4000" in text
    assert "go on with: rlflow run --resume run" in text
    assert "Traceback" not in text
    assert (endless.root / "run" / "checkpoints" / f"global_step_{done[-1]}" / "actor" / "config.json").is_file()
    for name in ("trace.json", "learning_curve.svg"):
        assert (endless.root / "run" / name).is_file()
    assert json.loads((endless.root / "run" / "run.json").read_text("utf-8"))["status"] == "interrupted"
    while not all(has_ended(pid) for pid in children):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.1)
    endless.run("run", steps=done[-1] + 1, resume=True)
    assert steps_of(endless.root / "run") == list(range(1, done[-1] + 2))


def test_ctrl_c_during_start_up(endless: Any, command: Start, has_ended: Callable[[int], bool]) -> None:
    """While Ray starts. A second one by an impatient user does not disturb the cleaning up."""
    run = command("run", "sums.rlflow", "--run-dir", "run")
    run.until(lambda: len(run.descendants()) > 1)
    children = run.descendants()
    run.signal(signal.SIGINT)
    time.sleep(0.3)
    if run.process.poll() is None:
        children += run.descendants()
        run.signal(signal.SIGINT)
    assert run.wait(30) == 130
    assert run.text.splitlines()[-1] == "interrupted"
    assert "Traceback" not in run.text
    deadline = time.monotonic() + 20
    while not all(has_ended(pid) for pid in children):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.1)


def test_a_second_ctrl_c_ends_a_long_step(endless: Any, command: Start, address: str) -> None:
    endless.edit("timeout = 5 s", "timeout = 600 s")
    endless.edit("  evaluate held {", "  evaluate held every 4000 steps {")
    endless.rewards(SLOW_REWARDS % 0.02 + "\n\n_quick = score\n\n\ndef score(response, prompt):\n"
                    "    if __import__('pathlib').Path(__file__).with_name('slow').exists():\n        time.sleep(500)\n"
                    "    return _quick(response)\n")  # fmt: skip
    run = command("run", "sums.rlflow", "--run-dir", "run", "--address", address)
    run.until("step 1/4000")
    (endless.root / "slow").touch()
    time.sleep(0.5)
    run.signal(signal.SIGINT)
    run.until("Ctrl-C again to stop at once")
    time.sleep(0.5)
    assert run.process.poll() is None
    run.signal(signal.SIGINT)
    asked = time.monotonic()
    assert run.wait(20) == 130
    assert time.monotonic() - asked < 10
    assert run.text.splitlines()[-1] == "interrupted"
    assert "Traceback" not in run.text
    for name in ("trace.json", "learning_curve.svg"):
        assert (endless.root / "run" / name).is_file()


def test_sigterm_stops_as_ctrl_c_does(endless: Any, command: Start, address: str) -> None:
    run = command("run", "sums.rlflow", "--run-dir", "run", "--address", address)
    run.until("step 1/4000")
    run.signal(signal.SIGTERM, group=False)
    assert run.wait(30) == 130
    done = steps_of(endless.root / "run")
    assert f"stopped after step {done[-1]} of 4000; checkpoint: run/checkpoints/global_step_{done[-1]}" in run.text
    assert run.text.splitlines()[-1] == "go on with: rlflow run --resume run"


def _target(link: Path) -> Path | None:
    try:
        return link.readlink()
    except OSError:
        return None


def test_kill_9_then_resume(
    project: Any, command: Start, address: str, full_run: Any, has_ended: Callable[[int], bool]
) -> None:
    """Killed at any moment, a run goes on from its newest checkpoint to the same end."""
    project.edit("save every 2 steps", "save every 1 steps")
    rewards = (project.root / "rewards.py").read_text("utf-8")
    project.rewards(rewards.replace("    with LOG", "    __import__('time').sleep(0.05)\n    with LOG"))
    run = command("run", "sums.rlflow", "--run-dir", "run", "--address", address)
    run.until("step 2/4")
    logs = {project.root / "run" / "logs" / "main-0.log"}
    ranks = [int(link.parts[2]) for link in Path("/proc").glob("[0-9]*/fd/1") if _target(link) in logs]
    assert ranks
    run.process.kill()
    assert run.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while not all(has_ended(pid) for pid in ranks):
        assert time.monotonic() < deadline, "ranks live on without their driver"
        time.sleep(0.1)
    assert json.loads((project.root / "run" / "run.json").read_text("utf-8"))["status"] == "running"
    again = command("run", "--resume", "run", "--address", address)
    assert again.wait(90) == 0, again.text
    weights = project.root / "run" / "checkpoints" / "global_step_4" / "actor" / "model.safetensors"
    assert weights.read_bytes() == (full_run.checkpoint(4) / "actor" / "model.safetensors").read_bytes()
    assert steps_of(project.root / "run") == [1, 2, 3, 4]
