"""How long `rlflow check` takes: an example against importing lark, click and rich, and a program of 5,000 lines.

python benchmarks/check_time.py [--rounds 15] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "grpo_arithmetic.rlflow"
IMPORTS = "import lark, click, rich"
LINES = 5000
AIM_RATIO = 2.0
AIM_SECONDS = 2.0


# --- the large program ------------------------------------------------------------------------------------------------


def large_program(lines: int = LINES) -> str:
    """A sound program: one flow with a long step and many evaluations, and many small flows beside it.

    Of 5,000 lines some 1,800 are the step of the flow that is checked (a generation, rewards and weighted sums of
    them), 1,200 its 200 evaluations, 100 its rewards, and 1,900 the 100 other flows, which are parsed only.
    """
    out = ["flow large(group = 8, scale = 0.5) {"]
    out += [
        '  data sums = reasoning_gym("chain_sum", size = 1000)',
        '  data test = reasoning_gym("chain_sum", size = 50, seed = 1)',
    ]
    out += ['  model actor = tiny(qwen3, alphabet = "0123456789+-=. ")', "  model first = frozen(actor)"]
    out += [f'  reward r{i} = python("os.path:join", timeout = {i + 1} s)' for i in range(100)]
    tail = [*_evaluations(200), "  stop after 100 steps", "}"]
    others = [line for i in range(100) for line in _small_flow(i)]
    ends = list(_end())
    left = lines - len(out) - len(tail) - len(others) - len(ends)
    out += list(_step(left)) + tail + others + ends
    assert len(out) == lines, len(out)
    return "\n".join(out) + "\n"


def _step(lines: int) -> Iterator[str]:
    """So many lines: rewards of the samples, and running sums of them."""
    yield "  step {"
    yield "    batch = sums.take(64 prompts)"
    yield "    samples = actor.generate(batch, n = group, max_new = 64 tokens)"
    yield "    ref = first.logprobs(samples)"
    yield "    s0 = r0(samples)"
    for i in range(1, lines - 13):
        yield f"    s{i} = r{i % 100}(samples)" if i % 2 else f"    s{i} = scale * s{i - 1} + 0.25 * s{i - 2} - 0.125"
    yield f"    adv = group_normalize(0.5 * s{lines - 14} + 0.5 * s{lines - 15})"
    yield "    actor.train("
    yield "      samples,"
    yield "      advantages = adv,"
    yield "      reference = ref,"
    yield "      loss = ppo_clip(0.2) + 0.001 * kl(k3),"
    yield "      optimizer = adamw(lr = 1e-6),"
    yield "    )  # the one update"
    yield "  }"


def _evaluations(number: int) -> Iterator[str]:
    for i in range(number):
        yield f"  evaluate e{i} every {i + 1} steps {{"
        yield "    rows = test.all()"
        yield "    answers = actor.generate(rows, max_new = 32 tokens, temperature = 0)"
        yield f"    grade = 0.5 * r{i % 100}(answers) + 0.5 * r{(i + 1) % 100}(answers)"
        yield "  }"
        yield ""


def _small_flow(i: int) -> Iterator[str]:
    yield f"# flow {i}"
    yield f"flow small{i}(group = {i + 2}) {{"
    yield '  data   sums  = reasoning_gym("chain_sum", size = 100)'
    yield '  model  actor = tiny(qwen3, alphabet = "0123456789+-=. ")'
    yield "  reward exact = scorer(sums)"
    yield "  step {"
    yield "    batch   = sums.take(8 prompts)"
    yield "    samples = actor.generate(batch, n = group, max_new = 16 tokens, temperature = 1.0)"
    yield "    score   = exact(samples)"
    yield "    adv     = group_normalize(score, std = true)"
    yield "    actor.train("
    yield "      samples,"
    yield "      advantages = adv,"
    yield "      loss = ppo_clip(low = 0.2, high = 0.28) - 0.01 * entropy(),"
    yield "      optimizer = adamw(lr = 1e-4),"
    yield "    )"
    yield "  }"
    yield "  stop after 10 steps"
    yield "}"


def _end() -> Iterator[str]:
    yield "schedule large on pod {"
    yield "  pool main = 16 devices"
    yield "  place actor, first on main with dp = 16"
    yield "}"
    yield "cluster pod {"
    yield "  host  = 8 * ascend_910b { memory = 1.5 TiB, cpus = 64 }"
    yield "  hosts = 2 * host"
    yield "}"


# --- timing -----------------------------------------------------------------------------------------------------------


class Time(NamedTuple):
    """Of one process, in seconds."""

    wall: float
    processor: float
    """User and system; what else the machine does counts less here."""


def run(command: list[str], environment: dict[str, str]) -> Time:
    before, started = os.times(), time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    wall, after = time.perf_counter() - started, os.times()
    used = (after.children_user + after.children_system) - (before.children_user + before.children_system)
    return Time(wall, used)


def report(name: str, times: list[Time]) -> Time:
    """Prints; the medians."""
    wall = [found.wall for found in times]
    low, _, high = statistics.quantiles(wall, n=4)
    median = Time(statistics.median(wall), statistics.median(found.processor for found in times))
    spread = f"middle half {low * 1e3:.0f} to {high * 1e3:.0f}, fastest {min(wall) * 1e3:.0f}"
    print(f"{name:44} median {median.wall * 1e3:6.0f} ms, {spread}; processor {median.processor * 1e3:.0f} ms")
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="show where the time of the large program goes")
    parser.add_argument("--write", type=Path, help="only write the large program to this file")
    args = parser.parse_args()
    if args.write:
        args.write.write_text(large_program(), "utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        # Both sides run compiled modules, wherever Python may write them.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "pycache")
        large = Path(folder) / "large.rlflow"
        large.write_text(large_program(), "utf-8")
        check = [sys.executable, "-c", "from rlflow.cli import main; main()", "check"]
        sides = {
            f"rlflow check {EXAMPLE.relative_to(ROOT)}": [*check, str(EXAMPLE)],
            f"python -c '{IMPORTS}'": [sys.executable, "-c", IMPORTS],
        }
        times: dict[str, list[Time]] = {name: [] for name in sides}
        for name in sides:
            run(sides[name], environment)  # compiles
        for number in range(args.rounds):
            order = list(sides) if number % 2 else list(sides)[::-1]
            for name in order:
                times[name].append(run(sides[name], environment))
        ours, theirs = (report(name, found) for name, found in times.items())
        ratios = f"{ours.wall / theirs.wall:.2f}, of the processor's time {ours.processor / theirs.processor:.2f}"
        print(f"ratio of medians {ratios} (aim: at most {AIM_RATIO:g})")
        whole = [run([*check, "--flow", "large", str(large)], environment) for _ in range(max(2, args.rounds // 3))]
        print(f"aim of the next line: below {AIM_SECONDS:g} s")
        report(f"rlflow check of {LINES} lines", whole)
        if args.profile:
            _profile(large)


def _profile(file: Path) -> None:
    from rlflow import driver

    profile = cProfile.Profile()
    profile.runcall(driver.check, file, driver.Options(flow="large"))
    pstats.Stats(profile).sort_stats("cumtime").print_stats(40)


if __name__ == "__main__":
    main()
