"""Processes of a run are killed or stopped: the run goes on by itself to the same end, or says who is to blame."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fault_trials import done_steps, is_there, processes_of
from rlflow import driver, runs
from rlflow.backends.ray_runtime import watchdog
from rlflow.diagnostics import RunFailure

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

TWO_POOLS = """
schedule sums on four {
  pool rollout = 1 devices
  pool learner = 1 devices
  place actor.generate on rollout
  place actor.train, reference on learner
}
cluster four {
  host = 4 * cpu { memory = 8 GiB, cpus = 16 }
}
"""


class Told:
    """What the user reads of a run."""

    def __init__(self) -> None:
        self.total_steps: int | None = None
        self.messages: list[str] = []

    def phase(self, text: str) -> None:
        pass

    def step(self, step: int, data: dict[str, float]) -> None:
        pass

    def message(self, text: str) -> None:
        self.messages.append(text)


def execute(project: Any, restarts: int, limit_s: int | None = None) -> Told:
    """Run in this process."""
    plan = driver.compile(project.flow)
    if limit_s is not None:
        plan = plan.model_copy(update={"collective_timeout_s": limit_s})
    folder = project.root / "run"
    runs.open_run_dir(folder, resume=False)
    told = Told()
    runs.execute(runs.RunRequest(plan, project.root, folder, restarts=restarts), told)  # type: ignore[arg-type]
    return told


@contextlib.contextmanager
def after_step(folder: Path, step: int, act: Callable[[], None]) -> Iterator[threading.Thread]:
    """Do something beside the run when that many steps are done."""

    def watch() -> None:
        while done_steps(folder) < step:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield thread


def send(folder: Path, target: str, number: int) -> list[int]:
    found: list[int] = []
    while not found:
        found = processes_of(folder, os.getpid(), target)
    for pid in found:
        os.kill(pid, number)
    return found


def test_a_run_outlives_its_processes(project: Any, full_run: Any) -> None:
    """First a queue's actor, about when the first step is saved, then the rank that trains: nothing is lost or done
    twice, compared with one rank that nobody disturbed."""
    rewards = (project.root / "rewards.py").read_text("utf-8")
    project.rewards(rewards.replace("    with LOG", "    __import__('time').sleep(0.02)\n    with LOG"))
    project.flow.write_text(project.flow.read_text("utf-8") + TWO_POOLS, "utf-8")
    folder = project.root / "run"
    killed: list[int] = []

    def kill() -> None:
        first = processes_of(folder, os.getpid(), "learner")
        killed.extend(send(folder, "queue", signal.SIGKILL))
        while processes_of(folder, os.getpid(), "learner") in ([], first) or done_steps(folder) < 3:
            time.sleep(0.05)
        killed.extend(send(folder, "learner", signal.SIGKILL))

    with after_step(folder, 1, kill):
        told = execute(project, restarts=3)
    facts = json.loads((folder / "run.json").read_text("utf-8"))
    first, second = (restart["what"] for restart in facts["restarts"])
    assert first.startswith("the process of the queue `")
    assert second == "rank 0 of pool `learner` died"
    assert [r["code"] for r in facts["restarts"]] == ["RLF5011", "RLF5011"]
    assert facts["restarts"][1]["from_step"] == 2
    assert facts["status"] == "finished"
    assert any("restart 2 of 3: the run goes on from the checkpoint of step" in text for text in told.messages)
    assert any(text.strip().startswith("it was process") for text in told.messages)
    ours = type(full_run)(folder, [])
    assert ours.metrics == full_run.metrics, "every step and evaluation once, with the same numbers"
    for pool, steps in (("rollout", {0, 1, 2, 3, 4}), ("learner", {1, 2, 3, 4})):
        counts = Counter((e["step"], e["instruction"]) for e in ours.events(pool))
        assert set(counts.values()) == {1}
        assert {step for step, _ in counts} == steps, "the evaluation before the first step is on one pool"
    mine, theirs = ours.weights(4), full_run.weights(4)
    assert all(bool((mine[name] == theirs[name]).all()) for name in theirs)
    assert not any(is_there(pid) for pid in killed)


def test_a_rank_that_stands_still_is_named(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the only rank, so that only the driver can find out: RLF5050."""
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.5)
    project.edit("stop after 4 steps", "stop after 4000 steps")
    folder = project.root / "run"
    stopped: list[int] = []
    with (
        after_step(folder, 2, lambda: stopped.extend(send(folder, "main", signal.SIGSTOP))),
        pytest.raises(RunFailure) as failed,
    ):
        execute(project, restarts=0, limit_s=2)
    assert failed.value.code == "RLF5050"
    assert failed.value.message.startswith("rank 0 of pool `main` hangs: nothing was reported for ")
    assert "rank 0 of pool `main` does not answer within 0.5 s" in failed.value.notes
    until = time.monotonic() + 20
    while any(is_there(pid) for pid in stopped):
        assert time.monotonic() < until, "it is left"
        time.sleep(0.1)


def test_who_waits_says_who_is_late(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that trains waits for samples; its failure has the queue, and the rank that does not give them."""
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.5)
    project.edit("stop after 4 steps", "stop after 4000 steps")
    project.flow.write_text(project.flow.read_text("utf-8") + TWO_POOLS, "utf-8")
    folder = project.root / "run"
    with (
        after_step(folder, 2, lambda: send(folder, "rollout", signal.SIGSTOP) and None),
        pytest.raises(RunFailure) as failed,
    ):
        execute(project, restarts=0, limit_s=3)
    assert failed.value.code == "RLF5019"
    assert "of pool `learner` waited 3 s for the queue" in failed.value.message
    assert "rank 0 of pool `rollout` does not answer within 0.5 s" in failed.value.notes
    queues = [note for note in failed.value.notes if note.startswith("queue `")]
    assert any(re.search(r"0 of \d places, .* could take 0; open producers: rank 0", note) for note in queues), queues
    stacks = (folder / "logs" / "learner-0.log").read_text("utf-8")
    assert "stacks, asked for by the driver" in stacks


ASYNC_REWARDS = """\
import os, sys, time


def score(prompt, response):
    os.write(1, b"\\xff\\x00 not a line")
    print("score: 0.0", file=sys.stderr)
    if prompt == "0+1=":
        raise ValueError("no idea")
    if prompt == "0+2=":
        time.sleep(3600)
    return 1.0 + len(set(response))
"""


def test_failed_rewards_of_an_asynchronous_run_are_dropped_and_never_zero(project: Any) -> None:
    """One prompt's function raises, another's hangs; what they print is not read as a score."""
    project.rewards(ASYNC_REWARDS)
    with (project.root / "data.jsonl").open("a", encoding="utf-8") as data:
        data.write('{"question": "4+4=", "answer": "8"}\n')  # 12 rows: each is trained on once in 3 steps
    project.edit("timeout = 5 s", "timeout = 300 ms, on_error = retry(1, then = drop)")
    project.edit("  evaluate held every 2 steps {", "  allow actor staleness <= 1 steps with truncated_is(2.0)\n"
                 "  evaluate held every 200 steps {")  # fmt: skip
    project.edit("stop after 4 steps", "stop after 3 steps")
    late = TWO_POOLS.replace("place actor.generate", "staleness actor = 1 steps\n  place actor.generate", 1)
    project.flow.write_text(project.flow.read_text("utf-8") + late, "utf-8")
    execute(project, restarts=0)
    rows = [json.loads(line) for line in (project.root / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [row["data"] for row in rows if "training/global_step" in row["data"]]
    assert len(steps) == 3
    dropped = [step.get("reward_extra/points/reward_dropped/mean", 0.0) for step in steps]
    assert sum(dropped) * 4 == pytest.approx(2), "all samples of two prompts"
    assert all(step["critic/score/min"] >= 1 for step in steps), "a score that nobody gave"
