"""Optimizer updates of a step, counted from the rows of a batch."""

from __future__ import annotations

import pytest

from rlflow.diagnostics import SourceFile
from rlflow.frontend.lower import lower
from rlflow.grammar.parse import parse
from rlflow.ir.updates import updates_of

TEXT = """\
flow f {
  data d = reasoning_gym("chain_sum", size = 99)
  model m = tiny(qwen3, alphabet = "0123456789+-=. ")
  reward e = scorer(d)
  step {
    b = d.take(6 prompts)
    s = m.generate(b, n = 4, max_new = 4 tokens)
    score = e(s)
    BEFORE
    m.train(ROWS, advantages = ADV, loss = ppo_clip(), optimizer = adamw(1e-3)MORE)
  }
}
"""


@pytest.mark.parametrize(
    ("before", "rows", "advantages", "more", "updates"),
    [
        ("", "s", "group_normalize(score)", "", 1),
        ("", "s", "group_normalize(score)", ", minibatch = 8 samples", 3),
        ("", "s", "group_normalize(score)", ", minibatch = 8 samples, epochs = 2", 6),
        ("", "s", "group_normalize(score)", ", epochs = 3", 3),
        # Which samples are kept is decided in the run: all 24 may be.
        ("k = mixed_groups(s, score)", "k", "group_normalize(k.score)", ", minibatch = 8 samples", 3),
    ],
)
def test_mini_batches_times_epochs(before: str, rows: str, advantages: str, more: str, updates: int) -> None:
    text = TEXT.replace("BEFORE", before).replace("ROWS", rows).replace("ADV", advantages).replace("MORE", more)
    flow = lower(parse(SourceFile("f.rlflow", text)), None).flow
    assert updates_of(flow, flow.nodes["m.train"]) == updates
