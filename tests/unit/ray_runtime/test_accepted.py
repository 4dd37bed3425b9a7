"""What a plan may decide and the runtime does not do yet."""

from __future__ import annotations

from dataclasses import replace
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


def test_it_is_refused_with_a_word(tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match="does not reshard in place, as the plan does with `m`") as failure:
        refuse_unknown(compiled(tmp_path, reshard=", reshard = in_place"))
    assert failure.value.code == "RLF4003"


@pytest.mark.parametrize("lora", ["", ", lora = lora(rank = 8)"])
def test_other_plans_are_not(tmp_path: Path, lora: str) -> None:
    refuse_unknown(compiled(tmp_path, lora=lora))


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
    ("edit", "words"),
    [
        (("", ""), None),
        (
            ("carry partial", "carry nothing"),
            "no training begins on a part of its batch, and the plan starts a step at 75% of the samples of `s`",
        ),
        (("place m.generate on one", "place m.generate on one with tp = 2"), None),
        (("place m.generate on one", "place m.generate on one with pp = 2"), "`s` is placed with pp, cp or ep"),
    ],
)
def test_streams_of_samples_run_or_are_refused_by_name(
    tmp_path: Path, edit: tuple[str, str], words: str | None
) -> None:
    file = tmp_path / "f.rlflow"
    text = STALE.format(kept="s", score="e(s)", staleness="1 step", trigger="trigger s at 75%, carry partial", place="")
    file.write_text(text.replace(*edit), "utf-8")
    plan = driver.compile(file)
    if words is None:
        refuse_unknown(plan)
        return
    with pytest.raises(RunFailure) as failure:
        refuse_unknown(plan)
    assert words in failure.value.message
    assert failure.value.code == "RLF4003"


def test_what_shares_the_prompts_or_the_model_of_a_stream_is_refused(tmp_path: Path) -> None:
    plan = stale(tmp_path, trigger="trigger s at 75%, carry partial")
    samples, take = plan.stage("s"), plan.stage("b")
    reader = samples.model_copy(update={"id": "t"})
    twice = take.model_copy(update={"id": "c"})
    elsewhere = twice.model_copy(update={"op": replace(take.op, data="o")})
    beside = reader.model_copy(update={"inputs": {"prompts": "c"}})
    for more, words in (
        ((reader,), "`t` reads the prompts `b` beside `s`"),
        ((twice,), "`c` and `b` take from one data set"),
        ((elsewhere, beside), "`t` samples from `m` beside `s`"),
    ):
        with pytest.raises(RunFailure, match=words) as failure:
            refuse_unknown(plan.model_copy(update={"stages": (*plan.stages, *more)}))
        assert failure.value.code == "RLF4003"


@pytest.mark.parametrize("admit", ["admit wait", "admit slack_edf", "admit evict", "admit count", "burst = 2 steps"])
def test_every_rule_is_taken(tmp_path: Path, admit: str) -> None:
    refuse_unknown(stale(tmp_path, f"1 step, {admit}"))


def test_a_filter_that_wants_whole_batches_is_refused_beside_a_trigger(tmp_path: Path) -> None:
    plan = stale(tmp_path, trigger="trigger s at 75%, carry partial", refill=True)
    with pytest.raises(RunFailure, match="`kept` wants as many groups as the step takes prompts") as failure:
        refuse_unknown(plan)
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
