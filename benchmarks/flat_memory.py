"""Does a long run keep its memory? `python benchmarks/flat_memory.py [--steps 2000] [--out memory.json]`

A tiny model on two pools of this machine, sampling one step ahead of training, for many steps. At 10 %, 50 % and 100
% of the steps the resident memory of every process of the run (driver, ranks, queues, reward workers, Ray's own) and
the bytes in Ray's object store are printed, and for each a line fitted by least squares through all samples after the
first tenth: what a process gains per 1,000 steps. Memory of a process that only grows at the start, while caches
fill, has a slope near 0 there; a list that gets an entry each step has not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from rlflow import driver, runs
from rlflow.backends.visualizers.progress import Progress

FLOW = """\
flow flat(group = 4) {
  data   questions = jsonl("data.jsonl", prompt = "question", answer = "answer")
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
                optimizer = adamw(lr = 1e-3))
  }
  allow actor staleness <= 1 step with truncated_is(2.0)
  save every SAVE steps
  stop after STEPS steps
}

schedule flat on two {
  pool rollout = 1 devices
  pool learner = 1 devices
  place actor.generate on rollout
  place actor.train, reference on learner
  staleness actor = 1 step
}

cluster two {
  host = 2 * cpu { memory = 8 GiB, cpus = 8 }
}
"""
REWARD = "def score(response, answer):\n    return len(set(response)) + float(response == answer)\n"
MARKS = (0.1, 0.5, 1.0)
SAMPLES = 200
"""At most so many looks at the processes, spread over the run."""


@dataclass
class Series:
    """(step, bytes) of one process, or of the object store."""

    points: list[tuple[int, float]] = field(default_factory=list)

    def at(self, step: float) -> float:
        """Bytes at the sample nearest to a step."""
        return min(self.points, key=lambda point: abs(point[0] - step))[1]

    def slope(self, first: float) -> float:
        """Bytes a step, by least squares over the samples from step `first` on; NaN below three of them."""
        later = [point for point in self.points if point[0] >= first]
        if len(later) < 3:
            return float("nan")
        steps, sizes = np.array(later, dtype=np.float64).T
        return float(np.polyfit(steps, sizes, 1)[0])


def processes() -> dict[str, psutil.Process]:
    """Name to process: this one and all below it. Of several of one name each has its pid."""
    found: dict[str, psutil.Process] = {}
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if not words:
            continue
        name = "driver" if process.pid == this.pid else words[0].split("/")[-1]
        if name.startswith("python"):
            name = next((Path(word).name for word in words[1:] if not word.startswith("-")), name)
        name = name.split(".")[0] if name.startswith("ray::") else name  # Ray adds what an actor does just now
        found[name if name == "driver" else f"{name} {process.pid}"] = process
    return found


def store_bytes() -> float:
    """Bytes in Ray's object store on this machine, of what it was given less what is free."""
    import ray

    total = ray.cluster_resources().get("object_store_memory", 0.0)
    return total - ray.available_resources().get("object_store_memory", total)


class Watching(Progress):
    """A display that shows nothing and looks at the processes now and then."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, Console(quiet=True))
        self.series: dict[str, Series] = {}
        self._every = max(1, steps // SAMPLES)
        self._began = 0.0

    def phase(self, text: str) -> None:
        super().phase(text)
        self._began = time.monotonic()

    def step(self, step: int, data: Mapping[str, object]) -> None:
        super().step(step, data)
        if step % self._every:
            return
        for name, process in processes().items():
            try:
                size = float(process.memory_info().rss)
            except psutil.Error:
                continue
            self.series.setdefault(name, Series()).points.append((step, size))
        self.series.setdefault("object store", Series()).points.append((step, store_bytes()))
        if step % (self._every * 20) == 0:
            rate = step / (time.monotonic() - self._began)
            print(f"step {step}: {rate:.1f} steps/s", file=sys.stderr, flush=True)


def measure(steps: int, folder: Path) -> dict[str, Series]:
    """Run and watch; the series of what lived to the end, as far as the driver's: pools ahead of it end sooner."""
    (folder / "rewards.py").write_text(REWARD, "utf-8")
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    flow = folder / "flat.rlflow"
    flow.write_text(FLOW.replace("STEPS", str(steps)).replace("SAVE", str(max(1, steps // 4))), "utf-8")
    watching = Watching(steps)
    runs.execute(runs.RunRequest(driver.compile(flow), folder, folder / "run"), watching)
    last = max(step for step, _ in watching.series["driver"].points)
    return {name: s for name, s in watching.series.items() if s.points[-1][0] >= 0.9 * last and len(s.points) > 2}


def table(series: Mapping[str, Series], steps: int) -> str:
    """MiB at the marks and MiB a 1,000 steps."""
    lines = [f"{'process':42s}" + "".join(f"{mark:>9.0%}" for mark in MARKS) + "   per 1,000 steps"]
    for name, own in sorted(series.items()):
        sizes = "".join(f"{own.at(mark * steps) / 2**20:9.1f}" for mark in MARKS)
        lines.append(f"{name:42s}{sizes}   {own.slope(steps * MARKS[0]) * 1000 / 2**20:+.3f} MiB")
    return "\n".join(lines)


def folder_sizes(run: Path) -> dict[str, float]:
    """MiB of what a run wrote."""
    names = ("metrics.jsonl", "trace.json", "trace", "logs", "checkpoints")
    files = {name: [f for f in [run / name, *(run / name).rglob("*")] if f.is_file()] for name in names}
    return {name: round(sum(f.stat().st_size for f in own) / 2**20, 3) for name, own in files.items()}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="where the numbers go, as JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        series = measure(options.steps, Path(scratch))
        wrote = folder_sizes(Path(scratch) / "run")
    print(table(series, options.steps))
    print("written (MiB): " + ", ".join(f"{name} {size:g}" for name, size in wrote.items()))
    found = {
        "steps": options.steps,
        "written_mib": wrote,
        "series": {
            name: {
                "bytes": [own.at(mark * options.steps) for mark in MARKS],
                "bytes_per_step": own.slope(options.steps * MARKS[0]),
            }
            for name, own in series.items()
        },
    }
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    return found


if __name__ == "__main__":
    main()
