"""What `train` refuses or warns of beyond its arguments: whose samples, which sign, which bounds."""

from __future__ import annotations

import pytest

from rlflow.diagnostics import CompileError, SourceFile
from rlflow.frontend.lower import lower
from rlflow.grammar.parse import parse

FLOW = """\
flow f {
  data d = reasoning_gym("chain_sum", size = 9)
  model m = tiny(qwen3, alphabet = "0123456789")
  model other = tiny(qwen3, alphabet = "0123456789", init_seed = 1)
  model r = frozen(m)
  reward e = scorer(d)
  step {
    s = m.generate(d.take(4 prompts), n = 2, max_new = 4 tokens)
    adv = group_normalize(e(s))
    ref = r.logprobs(s)
    m.train(s, advantages = adv, reference = ref, loss = LOSS, optimizer = adamw(1e-3))
    other.train(OTHER, optimizer = adamw(1e-3))
  }
}
"""
SOUND = "ppo_clip(0.2) + 0.1 * kl(k3)"


def codes(loss: str = SOUND, other: str = "s, loss = nll()") -> list[str]:
    """Codes of all findings."""
    text = FLOW.replace("LOSS", loss).replace("OTHER", other)
    try:
        return [d.code for d in lower(parse(SourceFile("f.rlflow", text)), None).warnings]
    except CompileError as error:
        return [d.code for d in error.diagnostics]


def test_the_sound_twin() -> None:
    assert codes() == []


@pytest.mark.parametrize("loss", ["ppo_clip()", "reinforce()", "gspo()", "cispo()"])
def test_policy_gradient_wants_own_samples(loss: str) -> None:
    assert codes(other=f"s, advantages = adv, loss = {loss}") == ["RLF1009"]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("ppo_clip(0.2) - 0.1 * kl(k3)", ["RLF1020"]),
        ("-ppo_clip(0.2) + 0.1 * kl(k3)", ["RLF1020"]),
        ("ppo_clip(0.2) + 0.1 * kl(k3) - 0.01 * entropy()", []),
        ("ppo_clip(0.2) + 0.1 * kl(k1)", ["RLF1017"]),
    ],
)
def test_signs_and_estimators(loss: str, expected: list[str]) -> None:
    assert codes(loss) == expected


def test_a_ratio_is_not_clipped_below_zero() -> None:
    assert codes("ppo_clip(5) + 0.1 * kl(k3)") == ["RLF1010"]
    assert codes("ppo_clip(0.2, high = 5) + 0.1 * kl(k3)") == []
