"""Programs broken at random: each compiles or gets diagnostics with places inside the text, and nothing is a crash."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from rlflow.diagnostics import CompileError, SourceFile
from rlflow.diagnostics.render import render
from rlflow.driver import context_of
from rlflow.frontend.lower import lower
from rlflow.grammar.parse import parse
from rlflow.passes.pipeline import run_pipeline

DESIGN = (Path(__file__).parents[2] / "data" / "design_example.rlflow").read_text("utf-8")
ONE_POOL = re.sub(
    r"  pool learner.*?\n\n.*?\n\}",
    "  place actor, reference on rollout with dp = 16\n  place exact on cpu with workers = 8\n}",
    DESIGN,
    flags=re.DOTALL,
    count=1,
)
TOKEN = re.compile(r'"[^"\n]*"|[\d.]+(?:e-?\d+)?(?: ?(?:%|[A-Za-z]+(?:/[A-Za-z]+)?\b))?|[A-Za-z_]\w*|<=|[^\s]')
ODD = [
    "0", "-1", "1.5", "1e400", "9" * 400, "1e-320", "3 prompts", "3 samples", "2 tokens", "1 step", "5 s", "75%", "2 GiB",
    '""', '"x"', "true", "none", "[]", "[1, [2]]", "(1 - 1)", "group", "actor", "reference", "exact", "questions", "samples",
    "batch", "score", "adv", "ref", "kl()", "entropy()", "retry(3)", "adamw(1)", "exact(samples)", "actor.generate(batch, max_new = 1 token)",
    "group_normalize(score)", "local", "cpu", "ascend_910b", "host",
]  # fmt: skip


def check_answer(text: str) -> None:
    problems = ()
    try:
        program = parse(SourceFile("x.rlflow", text))
        start = lower(program, None)
        run_pipeline(start.flow, context_of(start))
    except CompileError as error:
        problems = error.diagnostics
    for problem in problems:
        assert problem.labels, problem
        for label in problem.labels:
            assert 0 <= label.span.start <= label.span.end <= len(text)
        assert not re.search(r"Token\(|object at 0x|<rlflow|nodes\.|Qty\(", problem.message)
    assert len(problems) == len(set(problems)), "nothing is said twice"
    render(problems, "full")


def test_both_texts_are_sound() -> None:
    for text in (DESIGN, ONE_POOL):
        lower(parse(SourceFile("x.rlflow", text)), None)
    start = lower(parse(SourceFile("x.rlflow", ONE_POOL)), None)
    run_pipeline(start.flow, context_of(start))


@pytest.mark.parametrize("seed", range(6))
def test_tokens_replaced(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(60):
        text = chance.choice((DESIGN, ONE_POOL))
        for _ in range(chance.choice((1, 1, 2))):
            tokens = list(TOKEN.finditer(text))
            target = chance.choice(tokens)
            new = chance.choice((chance.choice(ODD), chance.choice(tokens)[0], ""))
            text = text[: target.start()] + new + text[target.end() :]
        check_answer(text)


@pytest.mark.parametrize("seed", range(2))
def test_lines_moved(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(60):
        lines = chance.choice((DESIGN, ONE_POOL)).splitlines()
        line = lines.pop(chance.randrange(len(lines)))
        for _ in range(chance.choice((0, 1, 2))):
            lines.insert(chance.randrange(len(lines)), line)
        check_answer("\n".join(lines))
