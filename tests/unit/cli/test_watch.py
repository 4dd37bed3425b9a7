"""`rlflow watch`: follows a run folder that another process writes, and never touches it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow import driver
from rlflow.cli import main
from rlflow.follow import Follower, newest_run

ROOT = Path(__file__).parents[3]
PANGU = ROOT / "examples" / "pangu_ultra_moe.rlflow"
PLAN = driver.compile(PANGU).to_json()


def row(step: int, **more: float) -> str:
    data = {
        "training/global_step": float(step), "critic/score/mean": step / 10, "timing_s/gen": 0.5, "timing_s/step": 1.0,
        **more,
    }  # fmt: skip
    return json.dumps({"step": step, "data": data}) + "\n"


class Folder:
    """A run folder that the test writes, as a run does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        (path / "plan.json").write_text(PLAN, "utf-8")
        self.status("running")

    def status(self, status: str) -> None:
        facts = {"flow": "pangu_ultra_moe", "status": status, "steps": 4, "seed": 0, "seconds": 8.5}
        facts["started"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        (self.path / "run.json").write_text(json.dumps(facts), "utf-8")

    def add(self, text: str) -> None:
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(text)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["watch", *argv])
    assert isinstance(caught.value.code, int)
    return caught.value.code


# --- reading what grows ------------------------------------------------------------------------------------------------


def test_rows_come_once_and_whole(folder: Folder) -> None:
    follower = Follower(folder.path)
    assert follower.rows() == []
    folder.add(row(1) + row(2)[:20])
    assert [found["step"] for found in follower.rows()] == [1]
    assert follower.rows() == []
    folder.add(row(2)[20:] + "not json\n[1]\n" + '{"step": "3", "data": {}}\n' + row(3))
    assert [found["step"] for found in follower.rows()] == [2, 3]


def test_a_resumed_run_is_read_again(folder: Folder) -> None:
    follower = Follower(folder.path)
    folder.add(row(1) + row(2) + row(3))
    assert len(follower.rows()) == 3
    building = folder.path / "metrics.partial"
    building.write_text(row(1), "utf-8")
    building.replace(folder.path / "metrics.jsonl")
    folder.add(row(2))
    assert [found["step"] for found in follower.rows()] == [1, 2]


def test_quiet_since_the_last_write(folder: Folder) -> None:
    folder.add(row(1))
    now = (folder.path / "metrics.jsonl").stat().st_mtime
    follower = Follower(folder.path)
    assert follower.quiet_seconds(now + 90) == pytest.approx(90)
    assert follower.quiet_seconds(now - 5) == 0


def test_newest_run(tmp_path: Path) -> None:
    assert newest_run(tmp_path) is None
    for age, name in ((300, "b/old"), (10, "a/new"), (200, "c/older")):
        made = Folder(tmp_path / name)
        os.utime(made.path / "plan.json", (time.time() - age,) * 2)
    assert newest_run(tmp_path) == tmp_path / "a" / "new"


# --- runs that have ended ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("interrupted", 0), ("failed", 1)])
def test_a_run_that_has_ended(folder: Folder, status: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"pool/rollout/idle": 0.28, "pool/learner/idle": 0.01, "queue/samples->learner/depth": 1.5}
    folder.add(json.dumps({"step": 0, "data": {"val/held/mean": 0.25}}) + "\n")
    folder.add(row(1, **extra, **{"age/samples/mean": 0.97, "age/samples/max": 1}))  # type: ignore[arg-type]
    folder.status(status)
    before = {path: path.read_bytes() for path in folder.path.iterdir()}
    assert call(str(folder.path)) == code
    captured = capsys.readouterr()
    line = next(line for line in captured.err.splitlines() if line.startswith("step 1/4"))
    assert "reward 0.1000" in line
    assert "(gen 0.50)" in line
    assert "idle rollout 28%, learner 1%" in line
    assert "queue samples->learner 1.5 of 2" in line
    assert "age of samples 0.97, at most 1" in line
    assert "step 0  held out held 0.2500" in captured.err
    assert f"flow pangu_ultra_moe: {status}, step 1 of 4, 8.5 s; seed 0" in captured.out
    assert {path: path.read_bytes() for path in folder.path.iterdir()} == before


def test_once_does_not_wait(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.add(row(1) + row(2))
    assert call(str(folder.path), "--once") == 0
    captured = capsys.readouterr()
    assert "running, step 2 of 4; seed 0" in captured.out
    assert "a step: 1 s (gen 50%)" in captured.out
    assert captured.err == ""


def test_for_a_program(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.add(row(1) + row(2, **{"actor/loss": float("nan")}))
    assert call(str(folder.path), "--format", "json") == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert (found["status"], found["step"], found["steps"], found["checkpoint"]) == ("running", 2, 4, None)
    assert found["metrics"]["critic/score/mean"] == 0.2
    assert found["metrics"]["actor/loss"] is None
    assert found["quiet_s"] < 60


def test_once_before_anything_is_written(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.path / "run.json").unlink()
    assert call(str(folder.path), "--once") == 0
    assert "flow ?: not started, step 0" in capsys.readouterr().out


def test_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert call() == 2
    assert "there is no run below `runs/`" in capsys.readouterr().err
    Folder(tmp_path / "runs" / "f" / "1").status("finished")
    assert call() == 0
    assert "run folder: runs/f/1" in capsys.readouterr().out
    assert call(str(tmp_path)) == 2
    assert "is not a run folder: it has no plan.json" in capsys.readouterr().err


# --- runs that go on ---------------------------------------------------------------------------------------------------


def test_until_the_end(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        for step in (1, 2, 2, 3):  # resumed from step 1 in between
            time.sleep(0.15)
            folder.add(row(step))
        time.sleep(0.15)
        folder.add(row(4))
        folder.status("finished")

    writer = threading.Thread(target=write)
    writer.start()
    assert call(str(folder.path), "--every", "0.05", "--plain") == 0
    writer.join()
    captured = capsys.readouterr()
    steps = re.findall(r"^step (\d)/4", captured.err, re.MULTILINE)
    assert steps == ["1", "2", "2", "3", "4"]
    assert "resumed: step 2 again" in captured.err
    assert "finished, step 4 of 4" in captured.out


def _hears_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def watching(folder: Folder) -> Iterator[Callable[..., Any]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, **streams: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rlflow", "watch", str(folder.path), "--every", "0.05", *argv]
        # A shell starts what is in the background deaf to Ctrl-C, and its children are too.
        started.append(subprocess.Popen(command, cwd=ROOT, preexec_fn=_hears_ctrl_c, **streams))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_ctrl_c_leaves(folder: Folder, watching: Callable[..., Any]) -> None:
    folder.add(row(1))
    process = watching(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    seen = b""
    while b"step 1/4" not in seen and process.poll() is None:
        seen += process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, b"")
    assert err.decode().splitlines()[-1] == "left; the run is not touched"
    assert b"Traceback" not in seen + err
    assert json.loads((folder.path / "run.json").read_text("utf-8"))["status"] == "running"


def test_on_a_terminal(folder: Folder, watching: Callable[..., Any]) -> None:
    """A panel that redraws itself; Ctrl-C gives the cursor back."""
    folder.add(row(1) + row(2))
    master, slave = pty.openpty()
    process = watching(stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    screen = b""
    while b"step 2 / 4" not in screen:
        screen += os.read(master, 65536)  # OSError when the process ends too early
    process.send_signal(signal.SIGINT)
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        screen += part
    assert process.wait(timeout=30) == 0
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode("utf-8", "replace"))
    for words in ("rlflow watch", "left about 2.0 s", "mean reward 0.2000", "gen", "0.50 s", "idle 50%"):
        assert words in text, words
    assert "left; the run is not touched" in text
    assert screen.rfind(b"\x1b[?25h") > screen.rfind(b"\x1b[?25l"), "the cursor is shown again"
