"""What a plan may decide and the runtime does not do yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow import driver
from rlflow.backends.ray_runtime.accepted import refuse_unknown
from rlflow.diagnostics import RunFailure
from rlflow.plan import Plan

TEXT = """
flow f {{
  data d = reasoning_gym("chain_sum", size = 9)
  model m = preset("qwen3_8b"{lora})
  reward e = scorer(d)
  step {{
    b = d.take(64 prompts)
    s = m.generate(b, n = 8, max_new = 512 tokens)
    m.train(s, advantages = group_normalize(e(s)), loss = ppo_clip(), optimizer = adamw(1e-6))
  }}
}}
schedule f on pod {{
  pool main = 8 devices
  place m.generate on main with tp = 2{reshard}
  place m.train on main with tp = 4
}}
cluster pod {{ host = 8 * ascend_910b {{ memory = 1.5 TiB }} }}
"""


def compiled(folder: Path, lora: str = "", reshard: str = "") -> Plan:
    file = folder / "f.rlflow"
    file.write_text(TEXT.format(lora=lora, reshard=reshard), "utf-8")
    return driver.compile(file)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"reshard": ", reshard = in_place"}, "does not reshard in place, as the plan does with `m`"),
        ({"lora": ", lora = lora(rank = 8)"}, "the plan sends those of `m`"),
    ],
)
def test_it_is_refused_with_a_word(tmp_path: Path, asked: dict[str, str], words: str) -> None:
    with pytest.raises(RunFailure, match=words) as failure:
        refuse_unknown(compiled(tmp_path, **asked))
    assert failure.value.code == "RLF4003"


def test_other_plans_are_not(tmp_path: Path) -> None:
    refuse_unknown(compiled(tmp_path))


STALE = """
flow f {{
  data d = reasoning_gym("chain_sum", size = 9)
  model m = tiny(qwen3, alphabet = "0123456789+-*= .?")
  model r = frozen(m)
  reward e = scorer(d)
  step {{
    b = d.take(64 prompts)
    s = m.generate(b, n = 8, max_new = 16 tokens)
    x = r.logprobs(s)
    m.train({kept}, advantages = group_normalize({score}), loss = ppo_clip() + 0.01 * kl(k3), reference = x, optimizer = adamw(1e-6))
  }}
  allow m staleness <= 8 steps with truncated_is(2.0)
}}
schedule f on pod {{
  pool one = 4 devices
  pool two = 4 devices
  place m.generate on one
  place m.train, r on two
  {place}
  staleness m = {staleness}
  {trigger}
}}
cluster pod {{ host = 8 * cpu {{ memory = 64 GiB, cpus = 64 }} }}
"""


def stale(folder: Path, staleness: str = "1 step", trigger: str = "", refill: bool = False) -> Plan:
    kept = "kept" if refill else "s"
    text = STALE.format(
        kept=kept, score="kept.score" if refill else "e(s)", staleness=staleness, trigger=trigger, place=""
    )
    if refill:
        text = text.replace("    x = r", "    kept = mixed_groups(s, e(s), refill = 2)\n    x = r")
        text = text.replace("logprobs(s)", "logprobs(kept)")
    file = folder / "f.rlflow"
    file.write_text(text, "utf-8")
    return driver.compile(file)


@pytest.mark.parametrize(
    ("staleness", "trigger", "words"),
    [
        ("1 step, admit wait", "", "admits samples by `wait` for `s`"),
        ("2 steps", "trigger s at 75%, carry partial", "starts a step at 75% of the samples for `s`"),
    ],
)
def test_other_orders_are_refused(tmp_path: Path, staleness: str, trigger: str, words: str) -> None:
    with pytest.raises(RunFailure, match=words) as failure:
        refuse_unknown(stale(tmp_path, staleness, trigger))
    assert failure.value.code == "RLF4003"


def test_batches_in_order_are_not(tmp_path: Path) -> None:
    refuse_unknown(stale(tmp_path))


def test_a_refill_stays_on_its_pool(tmp_path: Path) -> None:
    plan = stale(tmp_path, refill=True)
    assert plan.stage("kept").pool == "one", "where its samples are made"
    refuse_unknown(plan)
    moved = tuple(s.model_copy(update={"pool": "two"}) if s.id == "kept" else s for s in plan.stages)
    with pytest.raises(RunFailure, match="a refill of `kept` on pool `two` would run `s` again") as failure:
        refuse_unknown(plan.model_copy(update={"stages": moved}))
    assert failure.value.code == "RLF4003"
