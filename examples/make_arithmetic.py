"""Write addition questions as JSON Lines: {"question": "3+5=", "answer": "8"}.

    python examples/make_arithmetic.py                      # 0+0 .. 9+9, beside this file
    python examples/make_arithmetic.py --low 10 --high 99 --count 500 --output data/two_digits.jsonl

Equal arguments give equal bytes: without --count every pair once, in order; with it, that many different pairs drawn
with --seed.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

DEFAULT_OUTPUT = Path(__file__).parent / "data" / "arithmetic.jsonl"


def questions(low: int, high: int, count: int | None, seed: int) -> list[dict[str, str]]:
    """Sums of two numbers from low..high. `count` None = every pair; at most as many as there are pairs."""
    size = high - low + 1
    numbers = range(size * size) if count is None else random.Random(seed).sample(range(size * size), count)
    pairs = ((low + number // size, low + number % size) for number in numbers)
    return [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write addition questions as JSON Lines.")
    parser.add_argument("--low", type=int, default=0, help="smallest number in a sum (default 0)")
    parser.add_argument("--high", type=int, default=9, help="largest number in a sum (default 9)")
    parser.add_argument("--count", type=int, help="how many different pairs (default: all of them, in order)")
    parser.add_argument("--seed", type=int, default=0, help="which pairs --count draws (default 0)")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="file to write (default %(default)s)")
    arguments = parser.parse_args()
    pairs = (arguments.high - arguments.low + 1) ** 2
    if arguments.low > arguments.high:
        parser.error(f"--low {arguments.low} is above --high {arguments.high}")
    if arguments.count is not None and not 1 <= arguments.count <= pairs:
        parser.error(f"--count {arguments.count}: there are {pairs} pairs of numbers from --low to --high")

    rows = questions(arguments.low, arguments.high, arguments.count, arguments.seed)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
    print(f"wrote {len(rows)} questions to {arguments.output}")


if __name__ == "__main__":
    main()
