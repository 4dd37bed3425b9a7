"""Adapters from the ranks that train to those that sample: what travels, what comes out, under many layouts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlflow.driver import compile
from rlflow.plan import Plan
from tests.unit.ray_runtime import adapter_jobs as jobs
from tests.unit.ray_runtime.parallel.workers import Workers, started

FLOW = """\
flow sums {
  data   questions = jsonl("sums.jsonl", answer = "answer")
  model  actor     = tiny(ARCHITECTURE, alphabet = "0123456789+=", hidden = 32, layers = 2, heads = 4, kv_heads = KV,
                          compute = COMPUTE, lora = lora(rank = 4, targets = TARGETS))
  model  reference = frozen(actor)
  reward exact     = python("rewards:score")
  step {
    batch   = questions.take(8 prompts)
    samples = actor.generate(batch, n = 4, max_new = 4 tokens)
    ref     = reference.logprobs(samples)
    actor.train(samples, advantages = group_normalize(exact(samples)), reference = ref,
                loss = ppo_clip(0.2) + 0.01 * kl(k3), optimizer = adamw(lr = 1e-2))
  }
  stop after 5 steps
}
schedule sums on four {
PLACES
}
cluster four { host = 4 * cpu { memory = 8 GiB, cpus = 16 } }
"""
APART = """
  pool rollout = R devices
  pool learner = L devices
  place actor.generate on rollout with READ
  place actor.train, reference on learner with TRAIN"""
TOGETHER = """
  pool main = L devices
  place actor.generate on main with READ
  place actor.train, reference on main with TRAIN"""


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with started(4) as found:
        yield found


def plan_of(
    folder: Path,
    places: str,
    train: str = "dp = 1",
    read: str = "dp = 1",
    *,
    architecture: str = "qwen3",
    kv: int = 2,
    compute: str = "fp32",
    targets: str = "all_linear",
) -> Plan:
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (folder / "rewards.py").write_text("def score(response):\n    return 0.0\n", "utf-8")
    text = FLOW.replace("PLACES", places).replace("READ", read).replace("TRAIN", train)
    text = text.replace("ARCHITECTURE", architecture).replace("KV", str(kv)).replace("COMPUTE", compute)
    (folder / "sums.rlflow").write_text(text.replace("TARGETS", targets), "utf-8")
    return compile(folder / "sums.rlflow")


def apart(learners: int, rollouts: int) -> str:
    return APART.replace("R devices", f"{rollouts} devices").replace("L devices", f"{learners} devices")


CASES = {
    "the same on both": (apart(1, 1), "dp = 1", "dp = 1", {}),
    "bf16": (apart(1, 1), "dp = 1", "dp = 1", {"compute": "bf16"}),
    "sampled in parts": (apart(1, 2), "dp = 1", "tp = 2", {}),
    "sampled in parts in bf16": (apart(2, 2), "dp = 2", "tp = 2", {"compute": "bf16", "targets": "attention"}),
    "copies of key-value heads": (apart(1, 2), "dp = 1", "tp = 2", {"kv": 1, "architecture": "llama"}),
    "two replicas": (apart(1, 2), "dp = 1", "dp = 2", {}),
    "experts": (apart(1, 2), "dp = 1", "tp = 2, ep = 2, etp = 1", {"architecture": "qwen3_moe, experts = 4"}),
    "trained in parts": (apart(2, 1), "tp = 2", "dp = 1", {}),
    "parts to parts": (apart(2, 2), "tp = 2", "tp = 2", {"kv": 1}),
    "parts to replicas": (apart(2, 2), "tp = 2", "dp = 2", {"targets": '["q_proj", "mlp.down_proj"]'}),
    "FSDP": (apart(2, 1), "dp = 2, zero = 3", "dp = 1", {}),
    "FSDP on the same ranks": (TOGETHER.replace("L devices", "2 devices"), "dp = 2, zero = 3", "dp = 2", {}),
    "parts on the same ranks": (TOGETHER.replace("L devices", "2 devices"), "tp = 2", "dp = 2", {}),
    "sampled in parts on the same ranks": (TOGETHER.replace("L devices", "2 devices"), "dp = 2", "tp = 2", {}),
}


OLD = (
    "    ref     = reference.logprobs(samples)\n",
    "    ref     = reference.logprobs(samples)\n    old     = actor.logprobs(samples)\n",
)


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_sampled_from_is_the_sum(tmp_path: Path, workers: Workers, name: str) -> None:
    places, train, read, more = CASES[name]
    plan = plan_of(tmp_path, places, train, read, **more)  # type: ignore[arg-type]
    reshard = next(r for r in plan.reshards if r.model == "actor")
    assert reshard.adapters
    ranks = sum(len(pool.ranks) for pool in plan.pools if pool.device != "functions")
    found = workers.run(jobs.published, plan.to_json(), str(tmp_path), 3, ranks=ranks)
    assert [each.failure for each in found] == [None] * ranks
    samplers = [each for each in found if each.pool == reshard.target]
    assert sum(each.received for each in samplers) == reshard.received
    assert reshard.received or name in ("FSDP on the same ranks", "sampled in parts on the same ranks")
    for each in samplers:
        assert each.versions == (0, 1, 2, 3)
        assert len(set(each.digests)) == 4
        assert each.apart < (1e-6 if each.dtype == "torch.float32" else 0.02), each
    resumed = workers.run(jobs.published, plan.to_json(), str(tmp_path), 3, True, ranks=ranks)
    for before, after in zip(found, resumed, strict=True):
        assert after.failure is None
        assert after.digests == before.digests[-1:]
        assert after.versions == before.versions[-1:]
