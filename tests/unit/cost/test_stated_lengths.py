"""Lengths that a flow states, in seconds and bytes of a compiled plan."""

from __future__ import annotations

from pathlib import Path

from rlflow import driver
from rlflow.plan import Plan

TEXT = """
flow f {{
  data d = reasoning_gym("chain_sum", size = 9{prompt})
  model m = preset("qwen3_8b")
  reward e = scorer(d)
  step {{
    b = d.take(64 prompts)
    s = m.generate(b, n = 8, max_new = 2048 tokens{response})
    m.train(s, advantages = group_normalize(e(s)), loss = ppo_clip(), optimizer = adamw(1e-6))
  }}
}}
schedule f on pod {{ pool main = 16 devices place m on main with tp = 4 }}
cluster pod {{ host = 8 * ascend_910b {{ memory = 1.5 TiB }} hosts = 2 * host }}
"""


def compiled(folder: Path, prompt: int | None = None, response: int | None = None) -> Plan:
    file = folder / "f.rlflow"
    prompts = "" if prompt is None else f", prompt_tokens = {prompt} tokens"
    responses = "" if response is None else f", mean_new = {response} tokens"
    file.write_text(TEXT.format(prompt=prompts, response=responses), "utf-8")
    return driver.compile(file)


def times(plan: Plan) -> dict[str, int]:
    return {estimate.stage: estimate.us for estimate in plan.estimates}


def test_longer_samples_take_longer(tmp_path: Path) -> None:
    silent, short, long = (times(compiled(tmp_path, *said)) for said in ((None, None), (256, 100), (900, 1500)))
    assert times(compiled(tmp_path, 256, 512)) == silent, "what is assumed where nothing is said"
    for stage in ("s", "m.train"):
        assert short[stage] < silent[stage] < long[stage]


def test_a_mean_may_be_as_long_as_the_longest_or_nearly(tmp_path: Path) -> None:
    nearly, all_ = (times(compiled(tmp_path, 256, mean)) for mean in (2047, 2048))
    assert 0 < nearly["m.train"] <= all_["m.train"] * 1.001


def test_longer_prompts_take_memory(tmp_path: Path) -> None:
    def cache(plan: Plan) -> int:
        return next(dict(p.contents)["s keys and values"] for m in plan.memory for p in m.phases if p.stage == "s")

    assert cache(compiled(tmp_path, 2000)) > cache(compiled(tmp_path))


def test_nothing_else_of_the_plan_changes(tmp_path: Path) -> None:
    silent, stated = compiled(tmp_path), compiled(tmp_path, 300, 600)
    assert [stage.id for stage in silent.stages] == [stage.id for stage in stated.stages]
    assert [stage.layout for stage in silent.stages] == [stage.layout for stage in stated.stages]
