"""Random mutations of all examples, and typed programs with odd values in them: `python tests/fuzz/fuzz.py --count 20000 --seed 1`.

Every input must be answered (see fuzz_answer.py). An input that is not is written to tests/fuzz/seeds/, which the ordinary
suite checks, and its failure is printed; the exit code is then 1. `--show FILE` repeats one of them with its traceback.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from fuzz_answer import EXAMPLES, SEEDS, TooLong, answer, workplace
from fuzz_mutations import OVERRIDES, Unwritable, mutate_bytes, mutate_tree, mutate_words, stock, written
from fuzz_typed import typed_program

from rlflow.diagnostics import SourceFile
from rlflow.grammar import nodes
from rlflow.grammar.parse import parse

KINDS = ("bytes", "words", "tree", "typed")
NEAR = tuple(sorted(EXAMPLES.glob("*.rlflow")))
TEXTS = (
    *(path.read_text("utf-8") for path in NEAR),
    (EXAMPLES.parent / "tests/data/design_example.rlflow").read_text("utf-8"),
)


@dataclass(frozen=True)
class Input:
    """One mutated program; `broken` is what already went wrong when it was made."""

    kind: str
    raw: bytes
    overrides: tuple[str, ...] = ()
    broken: str = ""


class Source:
    """Inputs number 0, 1, ... of a seed; each depends on the seed and its number only."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._trees = [parse(SourceFile("x.rlflow", text)) for text in TEXTS]
        self._kept = stock(self._trees)
        self._odd = [node for kind in get_args(nodes.Expr) for node in self._kept.get(kind, [])]

    def input(self, number: int) -> Input:
        chance = random.Random(f"{self._seed}.{number}")
        kind = KINDS[number % len(KINDS)]
        overrides = tuple(chance.sample(OVERRIDES, chance.choice((1, 2)))) if chance.random() < 0.15 else ()
        which = chance.randrange(len(TEXTS))
        if kind == "bytes":
            return Input(kind, mutate_bytes(TEXTS[which].encode(), chance), overrides)
        if kind == "words":
            return Input(kind, mutate_words(TEXTS[which], TEXTS, chance).encode(), overrides)
        if kind == "typed":
            tree = typed_program(chance, self._odd, chance.choice((0.0, 0.02, 0.1, 0.4)))
        else:
            tree = mutate_tree(self._trees[which], self._kept, chance)
        try:
            return Input(kind, written(tree).encode(), overrides)
        except Unwritable as error:
            return Input(kind, str(error.args[1]).encode(), overrides, str(error.args[0]))


def judged(path: Path, made: Input) -> tuple[str, str]:
    """The answer to one input, and what is wrong with it; empty = nothing."""
    if made.broken:
        return "", made.broken
    try:
        return answer(path, made.raw, made.overrides), ""
    except (Exception, TooLong):
        return "", traceback.format_exc(limit=-8)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=Path, help="check one kept input")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = workplace(Path(folder))
        if args.show:
            answered, found = judged(path, Input("kept", args.show.read_bytes()))
            print(found or answered)
            return int(bool(found))
        return fuzz(path, args.seed, range(args.first, args.first + args.count))


def fuzz(path: Path, seed: int, numbers: range) -> int:
    source, started, seen, answers = Source(seed), time.monotonic(), Counter[str](), Counter[str]()
    failures: dict[str, int] = {}
    slowest = 0.0
    for done, number in enumerate(numbers, start=1):
        made = source.input(number)
        before = time.process_time()
        answered, found = judged(path, made)
        slowest = max(slowest, time.process_time() - before)
        seen[made.kind] += 1
        answers.update(answered.split())
        if found:
            cause = found.strip().splitlines()[-1][:200]
            failures[cause] = failures.get(cause, 0) + 1
            if failures[cause] <= 3:  # further ones of the same cause are only counted
                file = SEEDS / f"{hashlib.sha256(made.raw).hexdigest()[:12]}.rlflow"
                file.write_bytes(made.raw)
                print(
                    f"FAILED input {number} ({made.kind}, overrides {made.overrides}) -> {file.name}\n{found}",
                    flush=True,
                )
        if done % 500 == 0 or done == len(numbers):
            rate = done / (time.monotonic() - started)
            print(
                f"{done} of {len(numbers)}, {rate:.0f}/s, slowest {slowest:.2f} s, {sum(failures.values())} failed",
                flush=True,
            )
    for cause, times in sorted(failures.items(), key=lambda pair: -pair[1]):
        print(f"{times:6} x {cause}")
    print(f"inputs by kind: {dict(seen)}\nanswers with: {dict(sorted(answers.items()))}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
