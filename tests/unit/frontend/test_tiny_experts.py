"""`tiny(qwen3_moe, experts = ..., experts_per_token = ...)`: what the compiler knows of it, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.diagnostics import CompileError
from rlflow.driver import compile
from rlflow.plan import Plan

FLOW = """\
flow add {
  data   sums  = reasoning_gym("chain_sum", size = 64)
  model  actor = tiny(MODEL)
  reward exact = scorer(sums)
  step {
    batch   = sums.take(8 prompts)
    answers = actor.generate(batch, n = 4, max_new = 8 tokens)
    adv     = group_normalize(exact(answers))
    actor.train(answers, advantages = adv, loss = ppo_clip(0.2), optimizer = adamw(lr = 1e-3))
  }
}
schedule add on pod {
  pool main = 4 devices
  place actor.generate on main with dp = 4
  place actor.train on main with LAYOUT
}
cluster pod { host = 4 * ascend_910b }
"""


def compiled(tmp_path: Path, model: str, layout: str = "dp = 4") -> Plan:
    path = tmp_path / "add.rlflow"
    path.write_text(FLOW.replace("MODEL", model).replace("LAYOUT", layout), "utf-8")
    return compile(path)


def test_a_layout_may_spread_its_experts(tmp_path: Path) -> None:
    plan = compiled(tmp_path, 'qwen3_moe, alphabet = "01", experts = 8, experts_per_token = 3', "dp = 4, ep = 4")
    source = plan.model("actor").source
    assert (source.experts, source.experts_per_token) == (8, 3)  # type: ignore[union-attr]
    train = next(stage for stage in plan.stages if stage.id == "actor.train")
    assert train.layout is not None
    assert train.layout.ep == 4


def test_two_experts_per_token_unless_told_otherwise(tmp_path: Path) -> None:
    plan = compiled(tmp_path, 'qwen3_moe, alphabet = "01", experts = 2')
    assert plan.model("actor").source.experts_per_token == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "layout", "code", "says"),
    [
        ('qwen3, alphabet = "01", experts = 4', "dp = 4", "RLF1010", "a model of `qwen3` has no experts"),
        ('llama, alphabet = "01", experts_per_token = 1', "dp = 4", "RLF1010", "`experts_per_token = 1`: a model of"),
        ('qwen3_moe, alphabet = "01"', "dp = 4", "RLF1010", "`qwen3_moe` needs `experts`"),
        ('qwen3_moe, alphabet = "01", experts = 4, experts_per_token = 5', "dp = 4", "RLF1010", "more than the 4"),
        ('qwen3_moe, alphabet = "01", experts = 6', "dp = 4, ep = 4", "RLF2001", "does not divide the 6 experts"),
        ('qwen3, alphabet = "01"', "dp = 4, ep = 4", "RLF2001", "has no experts to spread"),
    ],
)
def test_mistakes(model: str, layout: str, code: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as failure:
        compiled(tmp_path, model, layout)
    (problem,) = failure.value.diagnostics
    assert problem.code == code
    assert says in problem.message
