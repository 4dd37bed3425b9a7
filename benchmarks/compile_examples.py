"""Processor seconds of a whole compile, text to plan, of every example; aim: under 1 s each.

One process per example, as a user runs it; the least of a few runs, since the machine is shared. Beside each the same
for a Python that only imports the command line's libraries.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = 3
AIM_S = 1.0


def seconds(command: list[str]) -> float:
    """The least user and system seconds of the runs."""
    best = float("inf")
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def main() -> None:
    base = seconds([sys.executable, "-c", "import lark, click, rich"])
    print(f"{'import lark, click, rich':32}{base:8.3f} s")
    slowest = 0.0
    for file in sorted((ROOT / "examples").glob("*.rlflow")):
        taken = seconds([sys.executable, "-m", "rlflow", "compile", str(file), "-o", "/dev/null"])
        slowest = max(slowest, taken)
        print(f"{file.name:32}{taken:8.3f} s{taken / base:8.1f} x")
    print(f"slowest {slowest:.3f} s, aim {AIM_S:g} s")


if __name__ == "__main__":
    main()
