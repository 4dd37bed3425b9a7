"""What `--lengths` may say, and to which plans (RLF5063)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow import driver
from rlflow.cost.lengths import Lognormal, mean
from rlflow.diagnostics import RunFailure
from rlflow.imposed_lengths import imposed_lengths
from rlflow.plan import Plan

FLOW = """
flow sums {
  data  d = reasoning_gym("chain_sum", size = 64)
  model m = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1)
  reward e = scorer(d)
  step {
    b = d.take(4 prompts)
    s = m.generate(b, n = 8, max_new = 100 tokens)
    m.train(s, advantages = group_normalize(e(s)), loss = ppo_clip(), optimizer = adamw(lr = 1e-3))
  }
  evaluate held every 2 steps {
    t = d.all()
    g = m.generate(t, max_new = 10 tokens, temperature = 0)
    c = e(g)
  }
}
"""
TALKS = """
flow talks {
  data d = reasoning_gym("chain_sum", size = 64)
  model m = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1)
  environment shell = python("shell:Shell")
  reward e = scorer(d)
  step {
    b = d.take(4 prompts)
    s = m.generate(b, n = 8, max_new = 100 tokens, environment = shell, turns = 3)
    m.train(s, advantages = group_normalize(e(s)), loss = ppo_clip(), optimizer = adamw(lr = 1e-3))
  }
}
"""


def compiled(folder: Path, text: str) -> Plan:
    path = folder / "flow.rlflow"
    path.write_text(text, "utf-8")
    return driver.compile(path)


def test_stages_of_a_step_get_lengths(tmp_path: Path) -> None:
    found = imposed_lengths(compiled(tmp_path, FLOW), "lognormal(20, 1.5, 0.25)", 4)
    assert found.keys() == {"s"}
    lengths = found["s"].lengths
    assert isinstance(lengths, Lognormal)
    assert (mean(lengths), lengths.maximum) == (pytest.approx(20), 100)
    assert lengths.sigma == pytest.approx(1.5)
    assert lengths.sigma_prompt**2 == pytest.approx(0.25 * 1.5**2)
    drawn = [found["s"].tokens(0, prompt, sample) for prompt in range(2000) for sample in range(4)]
    assert sum(drawn) / len(drawn) == pytest.approx(20, rel=0.1)
    fixed = imposed_lengths(compiled(tmp_path, FLOW), "fixed(7)", 4)["s"]
    assert {fixed.tokens(0, prompt, 0) for prompt in range(50)} == {7}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("normal(3, 1)", "`normal(3, 1)` is not lognormal(MEAN, SIGMA)"),
        ("lognormal(3)", "`lognormal(3)` is not lognormal(MEAN, SIGMA)"),
        ("lognormal(a, 1)", "is not lognormal(MEAN, SIGMA)"),
        ("lognormal(nan, 1)", "a mean of at least 1 token"),
        ("lognormal(20, -1)", "a sigma from 0 to 10"),
        ("lognormal(20, 1, 2)", "a share from 0 to 1"),
        ("fixed(0)", "a mean of at least 1 token"),
        ("fixed(101)", "a mean of 101 tokens, and `s` makes at most 100"),
        ("lognormal(100, 1)", "a mean of 100 tokens, and `s` makes at most 100"),
    ],
)
def test_what_cannot_be_imposed_says_why(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailure) as failure:
        imposed_lengths(compiled(tmp_path, FLOW), text, 0)
    assert failure.value.code == "RLF5063"
    assert message in failure.value.message
    assert failure.value.help


def test_an_environment_ends_its_samples_itself(tmp_path: Path) -> None:
    (tmp_path / "shell.py").write_text("class Shell:\n    def step(self, text):\n        return text\n", "utf-8")
    with pytest.raises(RunFailure, match="the environment `shell` ends its samples") as failure:
        imposed_lengths(compiled(tmp_path, TALKS), "fixed(7)", 0)
    assert failure.value.code == "RLF5063"
