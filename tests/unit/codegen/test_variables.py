"""Environment variables of a run: every one with its reason, and those that depend on the plan as it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlflow import driver
from rlflow.backends.codegen.variables import variables
from rlflow.plan import Plan

FLOW = """
flow f {
  data d = reasoning_gym("chain_sum", size = 999)
  model m = preset("qwen2_5_7b")
  reward e = scorer(d)
  step {
    s = m.generate(d.take(64 prompts), n = 8, max_new = 1024 tokens)
    m.train(s, advantages = group_normalize(e(s)), loss = ppo_clip(), optimizer = adamw(1e-3))
  }
}
schedule f on pod {
  pool main = DEVICES devices
  place m.generate on main with tp = 2
  place m.train on main with tp = 2
}
cluster pod { host = 8 * KIND { memory = 1.5 TiB, cpus = 192 } hosts = 4 * host }
"""


@pytest.fixture
def compiled(tmp_path: Path) -> Any:
    def make(devices: int, kind: str = "ascend_910b") -> Plan:
        path = tmp_path / "f.rlflow"
        path.write_text(FLOW.replace("DEVICES", str(devices)).replace("KIND", kind), "utf-8")
        return driver.compile(path)

    return make


def values(plan: Plan, kind: str, interface: str = "") -> dict[str, str]:
    found = variables(plan, {kind}, interface)
    assert all(variable.why for variable in found)
    assert len({variable.name for variable in found}) == len(found)
    return {variable.name: variable.value for variable in found}


def test_expandable_segments_only_where_nothing_swaps(compiled: Any) -> None:
    """With them, memory of what sleeps is not given back."""
    swaps, fits = compiled(4), compiled(8)
    assert any(i.kind in ("offload", "onload", "drop") for program in swaps.programs for i in program.step)
    assert values(swaps, "npu")["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:False"
    assert values(fits, "npu")["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
    assert values(swaps, "cuda")["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"


def test_collectives_wait_as_long_as_the_plan_says(compiled: Any) -> None:
    plan = compiled(8).model_copy(update={"collective_timeout_s": 5000})
    found = values(plan, "npu")
    assert found["HCCL_EXEC_TIMEOUT"] == "5000"
    assert int(found["HCCL_EVENT_TIMEOUT"]) > 5000
    assert int(found["HCCL_CONNECT_TIMEOUT"]) > 120


def test_processes_of_one_host_do_not_fight_for_a_port(compiled: Any) -> None:
    found = values(compiled(8), "npu")
    assert found["HCCL_HOST_SOCKET_PORT_RANGE"] == found["HCCL_NPU_SOCKET_PORT_RANGE"] == "auto"


def test_a_kind_gets_its_own_variables(compiled: Any) -> None:
    plan = compiled(8)
    assert not [name for name in values(plan, "npu", "eth0") if "NCCL" in name or "CUDA" in name]
    assert not [name for name in values(plan, "cuda", "eth0") if "HCCL" in name or "NPU" in name]
    assert set(values(plan, "cpu")) == {"PYTHONUNBUFFERED"}
    assert (
        values(plan, "npu", "eth0")["HCCL_SOCKET_IFNAME"] == values(plan, "npu", "eth0")["GLOO_SOCKET_IFNAME"] == "eth0"
    )
    assert not [name for name in values(plan, "npu") if "VISIBLE" in name], "Ray gives out the devices"
