"""The recorded machines, for tests that are loaded by their path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from rlflow import driver
from rlflow.plan import Plan

PLAN = """
flow f {
  data d = reasoning_gym("chain_sum", size = 999)
  model m = preset("MODEL")
  reward e = scorer(d)
  step {
    b = d.take(64 prompts)
    s = m.generate(b, n = 8, max_new = 1024 tokens)
    m.train(s, advantages = group_normalize(e(s)), loss = ppo_clip(), optimizer = adamw(1e-3))
  }
}
schedule f on pod {
  pool main = DEVICES devices
  place m.generate on main with tp = 2
  place m.train on main with tp = 2
}
cluster pod { host = 8 * ascend_910b { memory = 1.5 TiB, cpus = 192 } hosts = 4 * host }
"""


@pytest.fixture(scope="session")
def recorded() -> Any:
    path = Path(__file__).with_name("recorded.py")
    spec = importlib.util.spec_from_file_location("doctor_recorded", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["doctor_recorded"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plan_for(tmp_path: Path) -> Any:
    """A plan on so many NPUs; on few of them the model swaps."""

    def make(devices: int, model: str = "qwen2_5_7b") -> Plan:
        path = tmp_path / "f.rlflow"
        path.write_text(PLAN.replace("DEVICES", str(devices)).replace("MODEL", model), "utf-8")
        return driver.compile(path)

    return make
