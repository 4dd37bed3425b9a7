"""A small project in a folder of its own, and ways to run it: in this process, or as a user would."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fault_trials import TIMES

FLOW = """\
flow sums(group = 4) {
  data   questions = jsonl("data.jsonl", prompt = "question", answer = "answer")
  data   held_out  = jsonl("held.jsonl", prompt = "question", answer = "answer")
  model  actor     = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1, intermediate = 64)
  model  reference = frozen(actor)
  reward exact     = python("rewards:score", timeout = 5 s)

  step {
    batch   = questions.take(4 prompts)
    samples = actor.generate(batch, n = group, max_new = 3 tokens)
    ref     = reference.logprobs(samples)
    points  = exact(samples)
    adv     = group_normalize(points)
    actor.train(samples, advantages = adv, reference = ref, loss = ppo_clip(0.2) + 0.01 * kl(k3),
                minibatch = 8 samples, optimizer = adamw(lr = 2e-3))
  }
  evaluate held every 2 steps {
    tests   = held_out.all()
    answers = actor.generate(tests, max_new = 3 tokens, temperature = 0)
    right   = exact(answers)
  }
  save every 2 steps
  stop after 4 steps
}
"""

# Every call is written down, so that tests see prompts, responses and their order.
REWARDS = """\
from pathlib import Path

LOG = Path(__file__).with_name("seen.txt")


def score(prompt, response, answer):
    with LOG.open("a") as log:
        log.write(f"{prompt}{response}\\n")
    return {"score": len(set(response)) + 0.25 * response.count(answer), "exact": response == answer}
"""


def deterministic(rows: list[dict[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """Metrics that do not depend on the clock."""
    return [(row["step"], {k: v for k, v in row["data"].items() if not k.startswith(TIMES)}) for row in rows]


def training(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "training/global_step" in row["data"]]


class Run:
    """What a run left behind."""

    def __init__(self, folder: Path, seen: list[str]) -> None:
        self.folder = folder
        self.seen = seen
        """Prompt and response of every scored sample of this run, in order."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text("utf-8").splitlines()]

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.folder / "run.json").read_text("utf-8"))
        return facts

    @property
    def metrics(self) -> list[tuple[int, dict[str, float]]]:
        return deterministic(self.rows)

    @property
    def trained_steps(self) -> list[int]:
        return [row["step"] for row in training(self.rows)]

    def events(self, pool: str = "main", rank: int = 0) -> list[dict[str, Any]]:
        text = (self.folder / "trace" / f"{pool}-{rank}.jsonl").read_text("utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"global_step_{step}"

    def weights(self, step: int) -> dict[str, Any]:
        from safetensors.torch import load_file

        tensors: dict[str, Any] = load_file(self.checkpoint(step) / "actor" / "model.safetensors")
        return tensors


class Project:
    """A folder with a flow, its data and its rewards."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.flow = root / "sums.rlflow"
        self.flow.write_text(FLOW, "utf-8")
        (root / "rewards.py").write_text(REWARDS, "utf-8")
        rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(5)]
        for name, part in (("data", rows[:11]), ("held", rows[10:])):
            (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), "utf-8")

    def edit(self, old: str, new: str) -> None:
        text = self.flow.read_text("utf-8")
        assert old in text, old
        self.flow.write_text(text.replace(old, new), "utf-8")

    def rewards(self, body: str) -> None:
        (self.root / "rewards.py").write_text(body, "utf-8")

    def seen(self) -> list[str]:
        log = self.root / "seen.txt"
        return log.read_text("utf-8").splitlines() if log.is_file() else []

    def run(self, name: str, *, steps: int | None = None, seed: int | None = None, resume: bool = False) -> Run:
        """Run in this process, on the Ray that it is connected to. Raises what `runs.execute` raises."""
        from rich.console import Console

        from rlflow import driver, runs
        from rlflow.backends.visualizers.progress import Progress

        folder = self.root / name
        if resume:
            plan = driver.load_plan(folder / "plan.json")
        else:
            plan = driver.compile(self.flow)
            runs.open_run_dir(folder, resume=False)
        (self.root / "seen.txt").unlink(missing_ok=True)
        progress = Progress(None, Console(stderr=True, quiet=True))
        runs.execute(runs.RunRequest(plan, self.root, folder, steps, seed, resume), progress)
        return Run(folder, self.seen())

    def cli(self, *arguments: str | Path) -> int:
        """The command line in this process; its exit code. What it prints is for `capsys`."""
        from rlflow.cli import main

        with pytest.raises(SystemExit) as end:
            main([*map(str, arguments)])
        assert isinstance(end.value.code, int)
        return end.value.code

    def start(self, *arguments: str | Path, **popen: Any) -> Command:
        return Command(self.root, [str(a) for a in arguments], **popen)


class Command:
    """`rlflow ...` in a process group of its own, as a shell would start it."""

    def __init__(self, folder: Path, arguments: list[str], **popen: Any) -> None:
        environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120", "RAY_USAGE_STATS_ENABLED": "0"}
        environment.pop("RAY_ADDRESS", None)
        self.output = folder / "output.txt"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlflow", *arguments],
                **{"cwd": folder, "env": environment, "stdout": output, "stderr": output} | popen,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text("utf-8", errors="replace")

    def until(self, found: Callable[[], bool] | str, seconds: float = 90) -> None:
        """Wait for a text in the output, or for anything else."""
        deadline = time.monotonic() + seconds
        while not (found in self.text if isinstance(found, str) else found()):
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text}"
            assert time.monotonic() < deadline, f"waited {seconds:g} s for {found!r}:\n{self.text}"
            time.sleep(0.05)

    def signal(self, number: int, group: bool = True) -> None:
        """To the whole process group, as a terminal does with Ctrl-C, or to the driver alone."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def wait(self, seconds: float = 60) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds:g} s:\n{self.text}")

    def descendants(self) -> list[int]:
        parents: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(stat.parent.name))
        found, stack = [], [self.process.pid]
        while stack:
            children = parents.get(stack.pop(), [])
            found += children
            stack += children
        return found

    def kill(self) -> None:
        if self.process.poll() is None:
            for pid in self.descendants():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.process.kill()
            self.process.wait()


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture(scope="session")
def new_project(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Project]:
    """For fixtures that outlive a test."""
    return lambda: Project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="session")
def full_run(ray_cluster: Any, new_project: Callable[[], Project]) -> Run:
    """The flow from its first to its last step, uninterrupted, on one rank."""
    return new_project().run("run")


@pytest.fixture
def command(project: Project) -> Iterator[Callable[..., Command]]:
    """`command("run", "sums.rlflow", ...)` starts rlflow; what still runs at the end of the test is ended."""
    started: list[Command] = []

    def start(*arguments: str | Path, **popen: Any) -> Command:
        started.append(project.start(*arguments, **popen))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        shutil.rmtree(each.output.parent / "runs", ignore_errors=True)


@pytest.fixture
def has_ended() -> Callable[[int], bool]:
    """Whether a process is gone."""
    return lambda pid: not alive(pid)
