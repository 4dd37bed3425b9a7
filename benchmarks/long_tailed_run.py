"""Long-tailed responses on two pools: synchronous, one step ahead, and with a trigger and partial rollouts.

    python benchmarks/long_tailed_run.py

Three plans of one flow, run for real on this machine's CPUs: engine, queues, reward, training, publications. A tiny
model of random weights does not write responses of lognormal length, so `--lengths` imposes them: a draw ends a sample,
the same in every plan. `rlflow profile` measures the synchronous plan once, and the simulator predicts all three from
it, with the same draws. Rounds alternate the plans. Printed are samples trained per second after a warm-up and their
ratio to the synchronous plan, beside what was predicted, and the oldest sample. A run in which a prompt was trained
twice or left out ends the script.

A second prediction takes the stages' times from the run that it is for. Where it fits and the first does not, the plan
was understood, and stages take longer beside each other than alone, as they do where other work or too few cores
disturb them.

See README.md for what is counted, and for the numbers of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from rlflow import driver
from rlflow.backends.simulator.clock import Time
from rlflow.backends.simulator.report import Result
from rlflow.backends.simulator.run import Options, simulate, simulate_seeds
from rlflow.profile.read import read_profile
from rlflow.profiler import profile_of
from rlflow.runs import read_events, read_metrics, read_run_json

WARM_UP = 4
"""Steps of a run, and of a simulation, that do not count."""
SEEDS = 10
"""Of the predictions' spread; the first has the run's draws."""
PLANS = {
    "synchronous": "",
    "one step ahead": "  staleness actor = 1 step\n",
    "trigger 75 %, partial": "  staleness actor = 1 step\n  trigger samples at 75%, carry partial\n",
}
FLOW = """\
flow longtail(group = {group}) {{
  data   questions = jsonl("data.jsonl", prompt = "question", answer = "answer")
  model  actor     = tiny(qwen3, alphabet = "0123456789+=", hidden = {hidden}, layers = {layers},
                          intermediate = {intermediate}, context = {context} tokens)
  reward exact     = python("rewards:score", timeout = 60 s)
  step {{
    batch   = questions.take({prompts} prompts)
    samples = actor.generate(batch, n = group, max_new = {max_new} tokens)
    points  = exact(samples)
    adv     = group_normalize(points)
    actor.train(samples, advantages = adv, loss = ppo_clip(0.2), optimizer = adamw(lr = 1e-4),
                microbatch = {microbatch} tokens)
  }}
  allow actor staleness <= 2 steps with truncated_is(2.0)
  stop after {steps} steps
}}
schedule longtail on two {{
  pool rollout = 1 devices
  pool learner = 1 devices
  place actor.generate on rollout
  place actor.train    on learner
{staleness}}}
cluster two {{
  host = 2 * cpu {{ memory = 8 GiB, cpus = 16 }}
}}
"""
REWARDS = """\
from pathlib import Path

LOG = Path(__file__).with_name("scored.txt")


def score(prompt, response, answer):
    with LOG.open("a") as log:
        log.write(prompt + "\\n")
    return len(set(response)) + 0.25 * response.count(answer)
"""


@dataclass(frozen=True)
class Measured:
    """One run. Times in seconds."""

    samples_per_s: float
    steps: tuple[float, ...]
    """From the end of one training to the end of the next."""
    oldest: int
    prompts: int
    """That were trained."""
    own: float
    """Samples per second that the simulator gives with this run's times."""


@dataclass(frozen=True)
class Bench:
    root: Path
    given: argparse.Namespace

    def write(self) -> None:
        given = self.given
        sizes = {
            name: getattr(given, name)
            for name in ("group", "hidden", "layers", "prompts", "max_new", "steps", "microbatch")
        } | {"intermediate": 3 * given.hidden, "context": 64 + given.max_new}
        for number, staleness in enumerate(PLANS.values()):
            (self.root / f"plan{number}.rlflow").write_text(FLOW.format(staleness=staleness, **sizes), "utf-8")
        (self.root / "rewards.py").write_text(REWARDS, "utf-8")
        draw, rows, seen = random.Random(0), [], set()
        while len(rows) < given.prompts * (given.steps + 8):
            a, b = (draw.randrange(10 ** draw.randint(1, 20)) for _ in range(2))
            if (a, b) not in seen:
                rows.append({"question": f"{a}+{b}=", "answer": str(a + b)})
                seen.add((a, b))
        (self.root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")

    def rlflow(self, *arguments: str) -> None:
        """Run a verb. RuntimeError with what it said when it fails."""
        ended = subprocess.run(
            [sys.executable, "-m", "rlflow", *arguments, "--lengths", self.lengths, "--plain"],
            cwd=self.root,
            capture_output=True,
            text=True,
        )
        if ended.returncode:
            raise RuntimeError(f"rlflow {' '.join(arguments)}: exit code {ended.returncode}\n{ended.stderr[-4000:]}")

    @property
    def lengths(self) -> str:
        return f"lognormal({self.given.mean}, {self.given.sigma})"

    def profile(self) -> None:
        self.rlflow("profile", "plan0.rlflow", "--steps", str(self.given.profile_steps), "-o", "profile.json")

    def run(self, number: int, name: str) -> Measured:
        (self.root / "scored.txt").unlink(missing_ok=True)
        self.rlflow("run", f"plan{number}.rlflow", "--run-dir", name)
        return self.measured(number, self.root / name)

    def measured(self, number: int, folder: Path) -> Measured:
        rows = [row["data"] for row in read_metrics(folder / "metrics.jsonl")]
        counts = [sum(v for k, v in row.items() if k.startswith("age/samples/count/")) for row in rows]
        trained = [event for event in read_events(folder) if event["instruction"] == "publish:actor"]
        ends = [(event["start_us"] + event["duration_us"]) / 1e6 for event in sorted(trained, key=lambda e: e["step"])]
        assert len(ends) == len(counts) == self.given.steps, f"{folder} has not the steps that were asked for"
        scored = Counter((self.root / "scored.txt").read_text("utf-8").split())
        state = json.loads((folder / "checkpoints" / f"global_step_{len(ends)}" / "state.json").read_text("utf-8"))
        edge = state.get("edges", {}).get("samples")
        prompts = round(sum(counts)) // self.given.group
        if edge is not None:  # in order, batch by batch, the next ones follow from the step
            assert edge["ends"] == {"trained": prompts}, edge["ends"]
        # What was sampled for steps that never came has been scored or not; nothing was scored twice.
        assert max(scored.values()) == self.given.group, "a prompt was sampled twice"
        assert sum(count == self.given.group for count in scored.values()) >= prompts
        return Measured(
            sum(counts[WARM_UP:]) / (ends[-1] - ends[WARM_UP - 1]),
            tuple(after - before for before, after in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)),
            max(round(row["age/samples/max"]) for row in rows),
            prompts,
            self.own(number, folder),
        )

    def own(self, number: int, folder: Path) -> float:
        """The simulated rate with the engine of this run, and for every step the training that it had."""
        events = list(read_events(folder))
        flow, facts = driver.check(self.root / f"plan{number}.rlflow").flow, read_run_json(folder)
        found = profile_of(flow, "two", events, read_metrics(folder / "metrics.jsonl"), facts).find("samples")
        profile = read_profile(self.root / "profile.json")
        assert found is not None
        stages = tuple(
            stage.model_copy(update={"engine": found.engine}) if stage.stage == "samples" else stage
            for stage in profile.stages
        )
        path = folder / "profile.json"
        path.write_text(profile.model_copy(update={"stages": stages}).to_json(), "utf-8")
        plan = driver.compile(self.root / f"plan{number}.rlflow", driver.Options(profile=path))
        trained = {e["step"] - 1: e["duration_us"] for e in events if e["instruction"] == "run:actor.train"}

        def draw(stage: str, step: int, us: Time) -> Time:
            return trained.get(step, us) if stage == "actor.train" else us

        asked = Options(steps=self.given.steps - WARM_UP, warm_up=WARM_UP, seed=plan.seed, draw=draw)
        return rate(simulate(plan, asked))

    def predicted(self, number: int) -> tuple[float, list[float], int]:
        """Samples per second with the run's draws and with those of other seeds, and the oldest sample."""
        plan = driver.compile(self.root / f"plan{number}.rlflow", driver.Options(profile=self.root / "profile.json"))
        asked = Options(steps=self.given.steps - WARM_UP, warm_up=WARM_UP)
        found = simulate_seeds(plan, asked, SEEDS)
        rates = [rate(result) for result in found]
        return rates[0], rates, max(result.worst_age for result in found)


def rate(result: Result) -> float:
    """Samples trained per second in the measured steps of a simulation."""
    first, last = result.warm_up, len(result.ends)
    ages = result.ages_by_step["samples"]
    samples = sum(sum(ages[step].values()) for step in range(first, last))
    return samples / (float(result.ends[-1] - result.ends[first - 1]) / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile-steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--group", type=int, default=4, help="samples of a prompt")
    parser.add_argument("--mean", type=float, default=72, help="tokens of a response")
    parser.add_argument("--sigma", type=float, default=1.0, help="of their logarithm")
    parser.add_argument("--max-new", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--microbatch", type=int, default=1024, help="padded tokens; long and short samples apart")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="an empty folder for the runs; else they are removed")
    given = parser.parse_args()
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
        measure(Bench(given.keep, given))
        return
    with tempfile.TemporaryDirectory(prefix="rlflow-longtail-") as folder:
        measure(Bench(Path(folder), given))


def measure(bench: Bench) -> None:
    import ray

    bench.write()
    # Ray's workers are nice to everything else, 15 by default: what little runs beside would be measured.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # One Ray for all: starting it takes longer than some runs.
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    os.environ |= {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "NO_COLOR": "1"}
    try:
        bench.profile()
        found: list[list[Measured]] = [[] for _ in PLANS]
        for round_ in range(bench.given.rounds):
            for number, name in enumerate(PLANS):
                one = bench.run(number, f"round{round_}-plan{number}")
                found[number].append(one)
                print(
                    f"round {round_ + 1}, {name}: {one.samples_per_s:.2f} samples/s; "
                    f"with the times of this run the simulator gives {one.own:.2f}",
                    flush=True,
                )
    finally:
        ray.shutdown()
    report(bench, found)


def report(bench: Bench, found: list[list[Measured]]) -> None:
    stage = read_profile(bench.root / "profile.json").find("samples")
    assert stage is not None
    print(f"\nprofile: {stage.engine}\nlengths: {bench.lengths}, at most {bench.given.max_new} tokens\n")
    print(
        f"{'samples/s (speed-up)':<22} {'measured':>15} {'predicted':>15} {'other draws':>12} {'with own times':>15}"
        f" {'median step':>12} {'oldest':>7} {'(predicted)':>11} {'prompts':>8}"
    )
    predicted = [bench.predicted(number) for number in range(len(PLANS))]
    measured = [fmean(m.samples_per_s for m in runs) for runs in found]
    own = [fmean(m.own for m in runs) for runs in found]
    for number, (name, runs) in enumerate(zip(PLANS, found, strict=True)):
        now, others, oldest = predicted[number]
        ups = [other / same for other, same in zip(others, predicted[0][1], strict=True)]
        pairs = (measured[number], measured[0]), (now, predicted[0][0]), (own[number], own[0])
        real, asked, again = (f"{rate_:>7.2f} ({rate_ / base:.2f})" for rate_, base in pairs)
        print(
            f"{name:<22} {real:>15} {asked:>15} {min(ups):>5.2f}..{max(ups):.2f} {again:>15}"
            f" {median(s for m in runs for s in m.steps):>10.2f} s {max(m.oldest for m in runs):>7} {oldest:>11}"
            f" {max(m.prompts for m in runs):>8}"
        )


if __name__ == "__main__":
    main()
