"""Plans to simulate: some flows under many schedules, compiled once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rlflow import driver
from rlflow.freeze import Provenance, freeze
from rlflow.ir.flow import Flow
from rlflow.plan import Plan, Source

MakePlan = Callable[..., Plan]

GRPO = """
flow f {{
  data d = reasoning_gym("chain_sum", size = 4096)
  model m = preset("qwen3_8b")
  model r = frozen(m)
  reward e = scorer(d)
  step {{
    b = d.take(32 prompts)
    s = m.generate(b, n = 8, max_new = {max_new} tokens)
    ref = r.logprobs(s)
    m.train(s, advantages = group_normalize(e(s)), reference = ref, loss = ppo_clip() + 0.001 * kl(k3),
            minibatch = 64 samples, optimizer = adamw(1e-6))
  }}
  allow m staleness <= 8 steps with truncated_is(2.0)
}}
"""
PPO = """
flow f {{
  data d = reasoning_gym("chain_sum", size = 4096)
  model m = preset("qwen3_8b")
  model r = frozen(m)
  model c = value(m)
  reward e = scorer(d)
  step {{
    b = d.take(32 prompts)
    s = m.generate(b, n = 8, max_new = {max_new} tokens)
    ref = r.logprobs(s)
    v = c.values(s)
    w = kl_reward(e(s), s, reference = ref, weight = 0.01)
    c.train(s, returns = returns(w, v), values = v, loss = value_clip(0.2), optimizer = adamw(1e-6))
    m.train(s, advantages = gae(w, v), loss = ppo_clip(), minibatch = 64 samples, optimizer = adamw(1e-6))
  }}
  allow m staleness <= 8 steps with truncated_is(2.0)
}}
"""
REMAX = """
flow f {{
  data d = reasoning_gym("chain_sum", size = 4096)
  model m = preset("qwen3_8b")
  reward e = scorer(d)
  step {{
    b = d.take(32 prompts)
    s = m.generate(b, n = 8, max_new = {max_new} tokens)
    greedy = m.generate(b, n = 1, max_new = {max_new} tokens, temperature = 0)
    m.train(s, advantages = remax(e(s), baseline = e(greedy)), loss = reinforce(), optimizer = adamw(1e-6))
  }}
  allow m staleness <= 8 steps with truncated_is(2.0)
}}
"""
TEACHER = """
flow f {{
  data d = reasoning_gym("chain_sum", size = 4096)
  model m = preset("qwen3_8b")
  model r = preset("qwen3_8b")
  reward e = scorer(d)
  step {{
    b = d.take(32 prompts)
    s = r.generate(b, n = 8, max_new = {max_new} tokens)
    k = best_of(s, e(s), keep = 2)
    m.train(k, loss = nll(), optimizer = adamw(1e-6))
  }}
}}
"""
CLUSTER = "cluster pod { host = 8 * ascend_910b { memory = 1.5 TiB } hosts = 8 * host }\n"

GRPO_PLACES = {
    "one pool": "pool main = 16 devices\nplace m, r on main with tp = 4",
    "other layout": "pool main = 16 devices\nplace m.generate on main with tp = 2\nplace m.train, r on main with tp = 4",
    "small devices": "pool main = 16 devices { memory = 24 GiB }\nplace m.generate on main with tp = 2\n"
    "place m.train, r on main with tp = 4",
    "split": "pool gen = 8 devices\npool fit = 8 devices\nplace m.generate on gen with tp = 2\n"
    "place m.train, r on fit with tp = 4",
    "much training": "pool gen = 32 devices\npool fit = 8 devices\nplace m.generate on gen with tp = 2\n"
    "place m.train, r on fit with tp = 4",
    "hybrid": "pool gen = 8 devices\npool fit = 8 devices\nplace m.generate, r on gen with tp = 2\n"
    "place m.train on fit with tp = 4",
    "three pools": "pool gen = 8 devices\npool look = 8 devices\npool fit = 8 devices\n"
    "place m.generate on gen with tp = 2\nplace r on look with tp = 2\nplace m.train on fit with tp = 4",
    "lent": "pool gen = 8 devices\npool fit = 8 devices\nplace m.generate on gen, fit with tp = 2\n"
    "place m.train, r on fit with tp = 4",
    "lent by two": "pool gen = 16 devices\npool look = 8 devices { memory = 24 GiB }\n"
    "pool fit = 8 devices { memory = 48 GiB }\nplace m.generate on gen, look, fit with tp = 2\n"
    "place r on look with tp = 2\nplace m.train on fit with tp = 4",
}
PPO_PLACES = {
    "one pool": "pool main = 16 devices\nplace m, r, c on main with tp = 4",
    "split": "pool gen = 8 devices\npool fit = 16 devices\nplace m.generate on gen with tp = 2\n"
    "place m.train, r, c on fit with tp = 4",
    "critic apart": "pool gen = 8 devices\npool fit = 8 devices\npool judge = 8 devices\n"
    "place m.generate on gen with tp = 2\nplace m.train, r on fit with tp = 4\nplace c on judge with tp = 4",
}
REMAX_PLACES = {
    "lent": "pool gen = 8 devices\npool fit = 8 devices\nplace m.generate on gen, fit with tp = 2\n"
    "place m.train on fit with tp = 4",
    "split": "pool gen = 8 devices\npool fit = 8 devices\nplace m.generate on gen with tp = 2\n"
    "place m.train on fit with tp = 4",
}
TEACHER_PLACES = {
    "split": "pool gen = 8 devices\npool fit = 8 devices\nplace r on gen with tp = 2\nplace m on fit with tp = 4",
    "one pool": "pool main = 16 devices\nplace m, r on main with tp = 4",
}
FLOWS = {
    "grpo": (GRPO, GRPO_PLACES),
    "ppo": (PPO, PPO_PLACES),
    "remax": (REMAX, REMAX_PLACES),
    "teacher": (TEACHER, TEACHER_PLACES),
}


@lru_cache
def checked(flow: str, places: str, staleness: str, max_new: int) -> driver.Checked:
    text, spots = FLOWS[flow][0].format(max_new=max_new), FLOWS[flow][1][places]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "f.rlflow"
        file.write_text(f"{text}\nschedule f on pod {{\n{spots}\n{staleness}\n}}\n{CLUSTER}", "utf-8")
        return driver.check(file)


@lru_cache
def compiled(flow: str, places: str, staleness: str, max_new: int) -> Plan:
    return frozen(checked(flow, places, staleness, max_new).flow)


def frozen(flow: Flow) -> Plan:
    return freeze(flow, Provenance("0", "pod", (Source(path="f.rlflow", sha256="0"),), (), ()))


@pytest.fixture
def make_plan() -> MakePlan:
    """`make_plan(places, staleness, flow="grpo", max_new=1024)`: the plan of a flow under a schedule."""

    def make(places: str, staleness: str = "", flow: str = "grpo", max_new: int = 1024) -> Plan:
        return compiled(flow, places, staleness, max_new)

    return make


@pytest.fixture
def check_flow() -> Callable[..., Flow]:
    """`check_flow(places, staleness, flow="grpo", max_new=1024)`: the flow behind `make_plan`, after all passes."""

    def make(places: str, staleness: str = "", flow: str = "grpo", max_new: int = 1024) -> Flow:
        return checked(flow, places, staleness, max_new).flow

    return make


@pytest.fixture
def freeze_flow() -> Callable[[Flow], Plan]:
    """The plan of a flow that a test has changed."""
    return frozen
