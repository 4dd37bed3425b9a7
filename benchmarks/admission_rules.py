"""What a bound on staleness costs under each consumption rule: rate, ages and waste in the token game.

python benchmarks/admission_rules.py [--steps 60] [--seed 0] [--bounds 0 1 2 4 8]

A batch of 512 samples, 1,024 slots, lengths lognormal (median 3,000 tokens, sigma 0.9, at most 27,648), 8 ms + 15 us
per running sample for a token, and a trainer that needs 80 % of the time in which the full engine makes a batch.
"""

from __future__ import annotations

import argparse
import random
import time

from rlflow.protocol.game import Game
from rlflow.protocol.settings import Settings
from rlflow.protocol.world import Report, World

BATCH = 512
SLOTS = 1024
MEDIAN = 3000
SIGMA = 0.9
CAP = 27_648
TRAINER = 0.8


def step_time(running: int) -> float:
    """Seconds per token of every running sample."""
    return 8e-3 + 15e-6 * running


class Lengths:
    """Tokens of sample 0, 1, ...: the same whatever the rule."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._made: list[int] = []

    def __call__(self, sample: int) -> int:
        while sample >= len(self._made):
            self._made.append(min(CAP, 1 + int(MEDIAN * self._random.lognormvariate(0, SIGMA))))
        return self._made[sample]


def play(settings: Settings, steps: int, seed: int) -> Report:
    lengths = Lengths(seed)
    mean = sum(lengths(i) for i in range(20_000)) / 20_000
    train = TRAINER * BATCH * mean * step_time(SLOTS) / SLOTS
    return Game(settings, World(lengths, train=lambda step: train, step_time=step_time, slots=SLOTS), steps).run()


def row(name: str, settings: Settings, steps: int, seed: int) -> str:
    began = time.perf_counter()
    report = play(settings, steps, seed)
    seconds = float(report.now)
    tokens = report.tally.trained_tokens
    wasted = report.wasted_tokens / (report.wasted_tokens + tokens)
    late = sum(sample.age > settings.bound for sample in report.samples) / len(report.samples)
    return (
        f"{settings.bound:>5}  {name:<24} {len(report.samples) / seconds:>9.2f} {tokens / seconds / 1000:>9.1f} "
        f"{report.mean_age:>8.2f} {report.worst_age:>7} {late:>10.0%} {wasted:>7.0%} "
        f"{time.perf_counter() - began:>7.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    options = parser.parse_args()
    print(
        f"{'bound':>5}  {'rule':<24} {'samples/s':>9} {'ktokens/s':>9} {'mean age':>8} {'max age':>7} "
        f"{'over bound':>10} {'wasted':>7} {'ran (s)':>7}"
    )
    for bound in options.bounds:
        rules = {
            "count": Settings("count", bound, BATCH),
            "in_order": Settings("in_order", bound, BATCH),
            "slack_edf": Settings("slack_edf", bound, BATCH),
            "wait, oldest first": Settings("wait", bound, BATCH),
            "evict": Settings("evict", bound, BATCH),
        }
        if bound:
            rules["slack_edf, burst bound"] = Settings("slack_edf", bound, BATCH, burst=bound)
            rules["slack_edf, burst bound+1"] = Settings("slack_edf", bound, BATCH, burst=bound + 1)
        for name, settings in rules.items():
            print(row(name, settings, options.steps, options.seed), flush=True)


if __name__ == "__main__":
    main()
