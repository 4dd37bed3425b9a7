"""Which device of its host a rank has: two pools on one host have different ones."""

from __future__ import annotations

from pathlib import Path

from rlflow import driver
from rlflow.backends.codegen.machines import host_groups

TEXT = """
flow f {
  data d = reasoning_gym("chain_sum", size = 9)
  model m = preset("qwen3_8b")
  reward e = scorer(d)
  step {
    b = d.take(64 prompts)
    s = m.generate(b, n = 8, max_new = 512 tokens)
    m.train(s, advantages = group_normalize(e(s)), loss = ppo_clip(), optimizer = adamw(1e-6))
  }
}
schedule f on pod {
  pool one = 4 devices
  pool two = 8 devices
  place m.generate on one with tp = 2
  place m.train on two with tp = 4
}
cluster pod {
  host  = 8 * ascend_910b { memory = 1.5 TiB, cpus = 192 }
  hosts = 2 * host
}
"""


def test_pools_of_one_host_share_no_device(tmp_path: Path) -> None:
    file = tmp_path / "f.rlflow"
    file.write_text(TEXT, "utf-8")
    checked = driver.check(file)
    plan = driver.plan_of(checked, driver.Options())
    taken = [(place.host, place.index) for pool in plan.pools if pool.device == "npu" for place in pool.ranks]
    assert len(set(taken)) == len(taken) == 12
    assert all(0 <= index < 8 for _, index in taken)
    (group,) = host_groups(plan, checked.lowered.cluster)
    most = max(sum(host == name for host, _ in taken) for name, _ in taken)
    assert group.devices == most, "launch files ask for as many devices as the fullest host has ranks"
