"""Does staleness cost reward? examples/grpo_arithmetic.rlflow on two pools, with staleness 0, 1, 2 and a trigger.

    python benchmarks/staleness_curves.py --steps 800 --seeds 3

Each kind is the example's flow with a schedule of its own: pool `rollout` samples, pool `learner` trains, and the
importance of stale tokens is corrected with `truncated_is(2.0)`. Every seed is a run of each kind, one after another;
the kinds of a seed begin with the same weights and see the same prompts. Prints the mean reward of every eighth of a
run, the share of all questions that are answered right greedily at the end, and the oldest sample. See README.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
KINDS = {
    "staleness 0": "",
    "staleness 1": "staleness actor = 1 step",
    "staleness 2": "staleness actor = 2 steps",
    "staleness 1, trigger 75 %": "staleness actor = 1 step\n  trigger samples at 75%, carry partial",
}
SCHEDULE = """
schedule grpo_arithmetic on two {
  pool rollout = 1 devices
  pool learner = 1 devices
  place actor.generate on rollout
  place actor.train, reference on learner
  %s
}
cluster two {
  host = 2 * cpu { memory = 8 GiB, cpus = 8 }
}
"""
PARTS = 8


def prepare(folder: Path, kind: str) -> Path:
    """The flow with the kind's schedule, in a folder of its own with what it reads."""
    folder.mkdir()
    shutil.copy(EXAMPLES / "rewards.py", folder)
    shutil.copytree(EXAMPLES / "data", folder / "data")
    text = (EXAMPLES / "grpo_arithmetic.rlflow").read_text("utf-8")
    stop = "  stop after "
    assert text.count(stop) == 1
    text = text.replace(stop, f"  allow actor staleness <= 2 steps with truncated_is(2.0)\n{stop}")
    file = folder / "flow.rlflow"
    file.write_text(text + SCHEDULE % KINDS[kind], "utf-8")
    return file


def run(file: Path, steps: int, seed: int) -> tuple[list[float], float, float]:
    """Mean reward of every part, share of right answers in the end, age of the oldest sample in steps."""
    folder = file.parent / f"run-{seed}"
    command = [sys.executable, "-m", "rlflow", "run", str(file), "--cluster", "two", "--plain"]
    command += ["--steps", str(steps), "--seed", str(seed), "--run-dir", str(folder)]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"a run failed:\n{done.stderr[-2000:]}")
    rows = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    rewards = [row["critic/rewards/mean"] for row in rows if "critic/rewards/mean" in row]
    ages = [row["age/samples/max"] for row in rows if "age/samples/max" in row]
    right = [row[name] for row in rows for name in row if name.startswith("val/") and name.endswith("correct/mean")]
    bounds = [number * len(rewards) // PARTS for number in range(PARTS + 1)]
    parts = [sum(rewards[a:b]) / max(1, b - a) for a, b in pairwise(bounds)]
    return parts, right[-1], max(ages, default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    given = parser.parse_args()
    print(f"{'':28} seed  mean reward of every eighth{'':21} right  oldest")
    with tempfile.TemporaryDirectory() as temporary:
        files = {kind: prepare(Path(temporary) / f"kind-{number}", kind) for number, kind in enumerate(given.kinds)}
        for seed in range(1, given.seeds + 1):
            for kind, file in files.items():
                parts, right, oldest = run(file, given.steps, seed)
                curve = " ".join(f"{part:.3f}" for part in parts)
                print(f"{kind:28} {seed:4}  {curve}  {right:.3f}  {oldest:.0f}", flush=True)


if __name__ == "__main__":
    main()
