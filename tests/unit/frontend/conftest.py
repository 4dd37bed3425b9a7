"""A small sound flow, and what the frontend says about edited copies of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rlflow.diagnostics import CompileError, Diagnostic, SourceFile
from rlflow.frontend.lower import Lowered, lower
from rlflow.grammar.parse import parse

FLOW = """\
flow f(group = 4) {
  data questions = jsonl("a.jsonl", answer = "answer")
  data puzzles = reasoning_gym("chain_sum", size = 100)
  model actor = tiny(architecture = qwen3, alphabet = "0123456789+=")
  model first = frozen(actor)
  reward exact = python("rewards:exact", timeout = 5 s)
  step {
    batch = questions.take(8 prompts)
    samples = actor.generate(batch, n = group, max_new = 16 tokens)
    ref = first.logprobs(samples)
    score = exact(samples)
    adv = group_normalize(score)
    actor.train(samples, advantages = adv, reference = ref, loss = ppo_clip(0.2) + 0.01 * kl(k3),
                minibatch = 16 samples, optimizer = adamw(lr = 1e-4))
  }
  evaluate heldout every 5 steps {
    rows = puzzles.all()
    answers = actor.generate(rows, max_new = 16 tokens, temperature = 0)
    grade = exact(answers)
  }
  allow actor staleness <= 2 steps with truncated_is(2.0)
  stop after 10 steps
  save every 5 steps
  seed 7
}
schedule f on pod {
  pool main = 4 devices
  place actor, first on main with dp = 4
  place exact on cpu with workers = 2
}
cluster pod {
  host = 2 * ascend_910b { memory = 1.5 TiB, cpus = 64 }
  hosts = 2 * host
}
"""

Edit = tuple[str, str]
Problems = Callable[..., list[Diagnostic]]
Lower = Callable[..., Lowered]


def edited(edits: Sequence[Edit]) -> str:
    text = FLOW
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the flow"
        text = text.replace(old, new)
    return text


@pytest.fixture
def lower_() -> Lower:
    """`lower_(edit, ..., overrides=..., base_dir=...)`: the flow with texts replaced, lowered; raises CompileError."""

    def run(*edits: Edit, base_dir: Path | None = None, **options: object) -> Lowered:
        return lower(parse(SourceFile("f.rlflow", edited(edits))), base_dir, **options)  # type: ignore[arg-type]

    return run


@pytest.fixture
def problems(lower_: Lower) -> Problems:
    """As `lower_`, but gives what was found: errors with warnings, or the warnings of a sound flow."""

    def run(*edits: Edit, **options: object) -> list[Diagnostic]:
        try:
            return list(lower_(*edits, **options).warnings)
        except CompileError as error:
            return list(error.diagnostics)

    return run
