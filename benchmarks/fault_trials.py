"""Kills processes of real runs at random moments, and compares what comes out with the run that nobody disturbed.

    python benchmarks/fault_trials.py --trials 20

A tiny model is trained with GRPO on two pools, `rlflow run` is a process of its own, and a checkpoint is written every
few steps. Each trial kills -9 one process at a moment drawn from a seed: the worker that samples, the one that trains,
the actor of a queue, or the driver. After the first three the run goes on by itself; a driver is started again with
`--resume`, when none of its processes is left. A trial is passed when in the end

* every step is in metrics.jsonl once, with the same losses, scores and lengths as undisturbed, and once in the traces;
* the prompts of every step are those of the undisturbed run in the same order, each trained once;
* the weights of the last checkpoint are equal, byte for byte.

`--staleness 1` and more need checkpoints that hold the samples under way; with 0, pools take turns. With `--trigger 75`
a step trains on what is finished first, so no two runs are equal. Then a trial is passed when every step is there once,
no row of the data is trained on twice or skipped by what the checkpoint says, and no sample is older than the plan
promises. One Ray serves all trials. See README.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASE = 6
ROWS, PROMPTS = BASE**2, 4
"""Of the data, of a step"""
TARGETS = ("rollout", "learner", "queue", "driver")
ACTORS = {"queue": b"QueueService", "edge": b"EdgeActor"}
FLOW = """\
flow sums {
  data   questions = jsonl("data.jsonl", prompt = "question", answer = "answer")
  model  actor     = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1, intermediate = 64)
  reward exact     = python("rewards:score", timeout = 60 s)
  step {
    batch   = questions.take(4 prompts)
    samples = actor.generate(batch, n = 4, max_new = %(length)d tokens)
    points  = exact(samples)
    adv     = group_normalize(points)
    actor.train(samples, advantages = adv, loss = ppo_clip(0.2), minibatch = 8 samples,
                optimizer = adamw(lr = 2e-3))
  }
%(allow)s  save every %(every)d steps
  stop after %(steps)d steps
}
schedule sums on two {
  pool rollout = 1 devices
  pool learner = 1 devices
  place actor.generate on rollout
  place actor.train on learner
%(staleness)s}
cluster two {
  host = 2 * cpu { memory = 8 GiB, cpus = 16 }
}
"""
REWARDS = """\
import time


def score(prompt, response, answer):
    time.sleep(%g)
    row = 6 * int(prompt[0]) + int(prompt[2])
    # The means of four powers say which four prompts a step has.
    return {"score": len(set(response)) + 0.25 * response.count(answer), **{f"p{k}": row**k for k in (1, 2, 3, 4)}}
"""
TIMES = ("timing_s/", "perf/throughput", "perf/time_per_step", "pool/", "rank/", "queue/")
"""Beginnings of names of metrics that depend on the clock."""


class Missed(Exception):
    """The run ended well before its moment had come."""


@dataclass
class Bench:
    """A folder with a flow, and how to run it. `pause`: seconds that the reward of a sample takes, to spread a run."""

    root: Path
    address: str
    steps: int = 6
    every: int = 2
    staleness: int = 0
    pause: float = 0.01
    trigger: int = 0
    """% of a batch at which a step starts; 0: whole batches."""
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        late = self.staleness
        allow = f"  allow actor staleness <= {late + bool(self.trigger)} steps with truncated_is(2.0)\n" if late else ""
        lag = f"  staleness actor = {late} steps\n" if late else ""
        if self.trigger:
            lag += f"  trigger samples at {self.trigger}%, carry partial\n"
        names = {"allow": allow, "every": self.every, "steps": self.steps, "staleness": lag}
        names["length"] = 24 if self.trigger else 3
        (self.root / "sums.rlflow").write_text(FLOW % names, "utf-8")
        (self.root / "rewards.py").write_text(REWARDS % self.pause, "utf-8")
        rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(BASE) for b in range(BASE)]
        (self.root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "NO_COLOR": "1", "RAY_USAGE_STATS_ENABLED": "0", **self.environment}
        with (self.root / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "rlflow", "run", *arguments, "--address", self.address],
                cwd=self.root,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def run(self, name: str, seconds: float = 600.0) -> Outcome:
        """The flow from its first to its last step, undisturbed."""
        finish(self.start("sums.rlflow", "--run-dir", name), seconds, self.root)
        return Outcome.of(self.root / name, self.steps)

    def trial(self, name: str, target: str, moment: float, seconds: float = 600.0) -> tuple[Outcome, str]:
        """A run in which `target` is killed when the share `moment` of its steps is done; what came out, and what was
        killed when."""
        folder = self.root / name
        process = self.start("sums.rlflow", "--run-dir", name)
        wanted = moment * self.steps
        until = time.monotonic() + seconds
        while done_steps(folder) < int(wanted) or not (folder / "logs").is_dir():
            _check(process, until, self.root)
            time.sleep(0.01)
        time.sleep((wanted % 1) * 0.5)  # somewhere inside of the step that follows
        victims = [process.pid] if target == "driver" else processes_of(folder, process.pid, target)
        while not victims:
            _check(process, until, self.root)
            victims = processes_of(folder, process.pid, target)
        said = f"{target} at step {done_steps(folder) + 1}"
        ranks = [*processes_of(folder, process.pid, "rollout"), *processes_of(folder, process.pid, "learner")]
        for pid in victims[:1]:
            os.kill(pid, signal.SIGKILL)
        if target == "driver":
            process.wait()
            while any(is_there(pid) for pid in ranks):
                if time.monotonic() > until:
                    raise AssertionError(f"processes of a dead driver live on: {ranks}")
                time.sleep(0.05)
            saved = (folder / "checkpoints" / "latest_checkpointed_iteration.txt").is_file()
            said += "" if saved else ", before the first checkpoint"
            process = self.start("--resume", name)
        finish(process, seconds, self.root)
        return Outcome.of(folder, self.steps), said


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    metrics: list[tuple[int, dict[str, float]]]
    """Of every training step, as they lie in the file, without times."""
    prompts: list[tuple[int, ...]]
    """Of every training step, the rows of the data that it was trained on"""
    weights: bytes
    repeated: list[str]
    """Instructions that are in a trace more than once for a step."""
    restarts: int
    edges: dict[str, Any]
    """The last checkpoint's word on prompts that were admitted one by one, by the stage that samples."""

    @classmethod
    def of(cls, folder: Path, steps: int) -> Outcome:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
        trained = [row for row in rows if "training/global_step" in row["data"]]
        metrics = [(row["step"], {k: v for k, v in row["data"].items() if not k.startswith(TIMES)}) for row in trained]
        counts: Counter[str] = Counter()
        prompts = [rows_of(data) for _, data in metrics]
        for file in sorted((folder / "trace").glob("*.jsonl")):
            for event in map(json.loads, file.read_text("utf-8").splitlines()):
                counts[f"{file.stem} {event['instruction']} of step {event['step']}"] += 1
        facts = json.loads((folder / "run.json").read_text("utf-8"))
        assert facts["status"] == "finished", facts["status"]
        checkpoint = folder / "checkpoints" / f"global_step_{steps}"
        weights = (checkpoint / "actor" / "model.safetensors").read_bytes()
        edges = json.loads((checkpoint / "state.json").read_text("utf-8")).get("edges", {})
        repeated = [what for what, count in counts.items() if count > 1]
        return cls(metrics, prompts, weights, repeated, len(facts["restarts"]), edges)

    def differences(self, other: Outcome) -> Iterator[str]:
        """In what this run differs from an undisturbed one."""
        steps = [step for step, _ in self.metrics]
        expected = [step for step, _ in other.metrics]
        if steps != expected:
            yield f"steps in metrics.jsonl: {steps}"
        for (step, ours), (_, theirs) in zip(self.metrics, other.metrics, strict=False):
            names = [name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)]
            if names:
                yield f"step {step}: {', '.join(sorted(names)[:3])}"
                break
        if self.prompts != other.prompts:
            yield f"prompts: {self.prompts}, undisturbed {other.prompts}"
        if self.weights != other.weights:
            yield "weights"
        yield from self.doubled()

    def doubled(self) -> Iterator[str]:
        """What was done more than once."""
        often = [row for row, count in Counter(row for step in self.prompts for row in step).items() if count > 1]
        if often and len(self.prompts) * PROMPTS <= ROWS:
            yield f"trained more than once: rows {often}"
        if self.repeated:
            yield f"in a trace more than once: {', '.join(self.repeated[:3])}"

    def lost(self, steps: int) -> Iterator[str]:
        """What a run of a stream left out, and what it did more than once. Its samples depend on the clock."""
        if [step for step, _ in self.metrics] != list(range(1, steps + 1)):
            yield f"steps in metrics.jsonl: {[step for step, _ in self.metrics]}"
        if not self.edges:
            yield "the checkpoint says nothing about prompts"
        for edge in self.edges.values():
            ended = [place for low, high in edge["ended"] for place in range(low, high)]
            missing = set(range(edge["next"])) - {*ended, *edge["again"]}
            if missing or len(set(ended)) < len(ended) or set(ended) & set(edge["again"]):
                yield f"prompts {sorted(missing)} are nowhere, of {edge}"
            trained = sum(len(rows) for rows in self.prompts)
            if not trained == edge["ends"].get("trained") == sum(edge["ends"].values()):
                yield f"{trained} prompts in the metrics, and the checkpoint says {edge['ends']}"
        yield from self.doubled()


def rows_of(data: dict[str, float]) -> tuple[int, ...]:
    """The rows of the data, at most `PROMPTS`, whose powers have the means that a step reports."""
    powers = [data[f"reward_extra/points/p{k}/mean"] for k in (1, 2, 3, 4)]
    for many in range(PROMPTS, 0, -1):
        for rows in itertools.combinations(range(ROWS), many):
            if all(abs(sum(r**k for r in rows) - many * mean) < 1e-6 * mean + 1e-3 for k, mean in enumerate(powers, 1)):
                return rows
    raise AssertionError(f"no {PROMPTS} rows have these means: {powers}")


def finish(process: subprocess.Popen[bytes], seconds: float, root: Path) -> None:
    """Wait for a run to end well."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still running after {seconds:g} s:\n{_tail(root)}") from None
    if code:
        raise AssertionError(f"ended with {code}:\n{_tail(root)}")


def _check(process: subprocess.Popen[bytes], until: float, root: Path) -> None:
    if process.poll() == 0:
        raise Missed
    if process.poll() is not None or time.monotonic() > until:
        raise AssertionError(f"it failed, or waited too long, before it was disturbed:\n{_tail(root)}")


def _tail(root: Path) -> str:
    return "\n".join((root / "output.txt").read_text("utf-8", errors="replace").splitlines()[-25:])


def done_steps(folder: Path) -> int:
    """Training steps that are written down."""
    try:
        lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return sum('"training/global_step"' in line for line in lines)


def processes_of(folder: Path, driver: int, target: str) -> list[int]:
    """The processes of a run that are a pool's ranks (by the log that they write) or, for `queue` and `edge`, actors
    of this driver's run (by the parent of their Ray and the time of their start)."""
    if target not in ACTORS:
        logs = {path.resolve() for path in (folder / "logs").glob(f"{target}-*.log")}
        found = []
        for link in Path("/proc").glob("[0-9]*/fd/1"):
            try:
                if link.readlink() in logs:
                    found.append(int(link.parts[2]))
            except OSError:
                continue
        return found
    ranks = processes_of(folder, driver, "rollout")
    if not ranks:
        return []
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            # A worker's parent is the Ray of its host, so that other runs on this machine are left alone.
            if ACTORS[target] in path.read_bytes() and _stat(int(path.parts[2]))[1] == _stat(ranks[0])[1]:
                found.append(int(path.parts[2]))
        except OSError:
            continue
    return found


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()


def is_there(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return "Z" not in _stat(pid)[0]
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=20, help="of every target")
    parser.add_argument(
        "--targets", nargs="+", choices=(*TARGETS, "edge"), help="`edge`, what admits samples, is there with --trigger"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--staleness", type=int, default=0, help="steps")
    parser.add_argument("--trigger", type=int, default=0, help="%% of a batch at which a step starts; with --staleness")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=2, help="steps from one checkpoint to the next")
    parser.add_argument("--keep", type=Path, help="folder for the runs; a temporary one if not given")
    given = parser.parse_args()
    targets = given.targets or [*TARGETS, *["edge"] * bool(given.trigger)]

    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    drawn = random.Random(given.seed)
    failed = Counter[str]()
    with tempfile.TemporaryDirectory() as temporary:
        root = given.keep or Path(temporary)
        bench = Bench(
            root,
            ray.get_runtime_context().gcs_address,
            given.steps,
            given.every,
            given.staleness,
            trigger=given.trigger,
        )
        began = time.monotonic()
        expected = bench.run("undisturbed")
        print(f"undisturbed: {given.steps} steps, {time.monotonic() - began:.0f} s", flush=True)
        for number in range(1, given.trials + 1):
            for target in targets:
                began = time.monotonic()
                said, problems = target, []
                for again in itertools.count():
                    moment = drawn.random() * (1 - 1 / given.steps)
                    try:
                        outcome, said = bench.trial(f"{target}-{number}{'-again' * again}", target, moment)
                    except Missed:
                        continue
                    except AssertionError as error:
                        problems = [str(error)]
                        break
                    problems = list(outcome.lost(given.steps) if given.trigger else outcome.differences(expected))
                    said += f", {outcome.restarts} restarts"
                    break
                failed[target] += bool(problems)
                result = "; ".join(problems) or ("nothing lost or doubled" if given.trigger else "equal")
                print(f"{number:3} {said}: {result} ({time.monotonic() - began:.0f} s)", flush=True)
    for target in targets:
        kept = "lost and doubled nothing" if given.trigger else "equal to the undisturbed run"
        print(f"{target}: {given.trials - failed[target]} of {given.trials} {kept}")
    ray.shutdown()
    sys.exit(1 if any(failed.values()) else 0)


if __name__ == "__main__":
    main()
