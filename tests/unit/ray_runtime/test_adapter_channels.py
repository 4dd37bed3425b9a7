"""Adapters from the ranks that train to those that sample: what travels, what comes out, under many layouts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlflow.backends.ray_runtime.adapters import Adapters
from rlflow.backends.ray_runtime.engine import weights_digest
from rlflow.backends.ray_runtime.local_weights import catalogue_of
from rlflow.backends.ray_runtime.merged_adapters import known_adapters
from rlflow.backends.ray_runtime.models import load_model
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.driver import compile
from rlflow.ir.ops import Lora, TinyModel
from rlflow.plan import MoveObject, Plan
from tests.unit.ray_runtime import adapter_jobs as jobs
from tests.unit.ray_runtime import rollout_jobs
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
  allow actor staleness <= 1 steps with truncated_is(2.0)
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
STUDENT = (
    """\
  model  student   = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1)
  model  reference""",
    """\
    tries   = student.generate(batch, n = 2, max_new = 4 tokens)
    teacher = actor.logprobs(tries)
    student.train(tries, teacher = teacher, loss = distill(), optimizer = adamw(lr = 1e-3))
  }
  allow""",
)
CRITIC = (
    ("  model  reference", "  model  critic    = value(actor, shared = true)\n  model  reference"),
    ("    actor.train", "    v       = critic.values(samples)\n    points  = exact(samples)\n    actor.train"),
    ("group_normalize(exact(samples))", "gae(points, v), returns = returns(points, v), values = v"),
    ("+ 0.01", "+ 0.5 * value_clip(0.2) + 0.01"),
)
PREDICTS = """
  pool rollout = R devices
  pool learner = L devices
  place actor.generate, actor.logprobs on rollout with READ
  place student.generate, student.train on rollout
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
    if "actor.logprobs" in places:
        text = text.replace("  model  reference", STUDENT[0]).replace("  }\n  allow", STUDENT[1])
    if "critic" in places:
        for old, new in CRITIC:
            text = text.replace(old, new)
    (folder / "sums.rlflow").write_text(text.replace("TARGETS", targets), "utf-8")
    return compile(folder / "sums.rlflow")


def apart(learners: int, rollouts: int, places: str = APART) -> str:
    return places.replace("R devices", f"{rollouts} devices").replace("L devices", f"{learners} devices")


CASES = {
    "the same on both": (apart(1, 1), "dp = 1", "dp = 1", {}),
    "bf16": (apart(1, 1), "dp = 1", "dp = 1", {"compute": "bf16"}),
    "sampled in parts": (apart(1, 2), "dp = 1", "tp = 2", {}),
    "sampled in parts in bf16": (apart(2, 2), "dp = 2", "tp = 2", {"compute": "bf16", "targets": "attention"}),
    "copies of key-value heads": (apart(1, 2), "dp = 1", "tp = 2", {"kv": 1, "architecture": "llama"}),
    "experts": (apart(1, 2), "dp = 1", "tp = 2, ep = 2, etp = 1", {"architecture": "qwen3_moe, experts = 4"}),
    "trained in parts": (apart(2, 1), "tp = 2", "dp = 1", {}),
    "parts to parts": (apart(2, 2), "tp = 2", "tp = 2", {"kv": 1}),
    "parts to replicas": (apart(2, 2), "tp = 2", "dp = 2", {"targets": '["q_proj", "mlp.down_proj"]'}),
    "predicted with too": (apart(1, 2, PREDICTS), "dp = 1", "tp = 2", {}),
    "FSDP on the same ranks": (TOGETHER.replace("L devices", "2 devices"), "dp = 2, zero = 3", "dp = 2", {}),
    "sampled in parts on the same ranks": (TOGETHER.replace("L devices", "2 devices"), "dp = 2", "tp = 2", {}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_sampled_from_is_the_sum(tmp_path: Path, workers: Workers, name: str) -> None:
    places, train, read, more = CASES[name]
    plan = plan_of(tmp_path, places, train, read, **more)  # type: ignore[arg-type]
    reshard = next(r for r in plan.reshards if r.model == "actor")
    assert reshard.adapters
    ranks = sum(len(pool.ranks) for pool in plan.pools if pool.device != "functions")
    found = workers.run(jobs.published, plan.to_json(), str(tmp_path), 3, ranks=ranks)
    samplers = [each for each in found if each.pool == reshard.target]
    assert sum(each.received for each in samplers) == reshard.received
    assert reshard.received or name in ("FSDP on the same ranks", "sampled in parts on the same ranks")
    for each in samplers:
        assert each.versions == (0, 1, 2, 3)
        assert len(set(each.digests)) == 4
        assert each.apart < (1e-6 if each.dtype == "torch.float32" else 0.02), each
    resumed = workers.run(jobs.published, plan.to_json(), str(tmp_path), 3, True, ranks=ranks)
    for before, after in zip(found, resumed, strict=True):
        assert after.digests == before.digests[-1:]
        assert after.versions == before.versions[-1:]


def test_a_reader_with_a_lag_gets_the_version_that_the_schedule_says(tmp_path: Path, workers: Workers) -> None:
    plan = plan_of(tmp_path, f"{apart(1, 2)}\n  staleness actor = 1 step", "dp = 1", "tp = 2")
    found = workers.run(jobs.published, plan.to_json(), str(tmp_path), 3, ranks=3)
    for each in found:
        if each.pool == "rollout":
            assert each.versions == (0, 0, 1, 2)
            assert [each.digests.index(digest) for digest in each.digests] == [0, 0, 2, 3]


@pytest.mark.parametrize(
    ("train", "critic"), [("dp = 1, tp = 2", False), ("dp = 2, zero = 3", True), ("dp = 2, zero = 1", False)]
)
def test_training_in_parts_goes_on_from_a_checkpoint_bit_for_bit(
    tmp_path: Path, workers: Workers, train: str, critic: bool
) -> None:
    places = TOGETHER.replace("L devices", "2 devices")
    if critic:
        places = places.replace("reference on", "reference, critic on")
    plan = plan_of(tmp_path, places, train, "dp = 2")
    for straight, resumed in workers.run(jobs.trained_and_resumed, plan.to_json(), str(tmp_path), ranks=2):
        assert straight == resumed


@pytest.mark.parametrize(("train", "own"), [("tp = 2", False), ("dp = 2", False), ("dp = 2, zero = 3", True)])
def test_the_reference_is_the_frozen_part_of_the_policy(
    tmp_path: Path, workers: Workers, train: str, own: bool
) -> None:
    plan = plan_of(tmp_path, TOGETHER.replace("L devices", "2 devices"), train, "dp = 2")
    for tensors, beside, same in workers.run(jobs.frozen_copies, plan.to_json(), str(tmp_path), ranks=2):
        assert tensors > 20
        assert beside == (tensors if own else 0)
        assert same <= (1e-6 if own else 0.0)  # FSDP's buffers begin where products round otherwise


TIGHT = """
  pool rollout = 1 devices { memory = 11400 KiB }
  pool learner = 1 devices
  place actor.generate, reference on rollout
  place actor.train on learner"""


def test_frozen_weights_and_sums_leave_the_device_as_the_plan_says(tmp_path: Path, workers: Workers) -> None:
    plan = plan_of(tmp_path, TIGHT)
    moved = {i.object for i in plan.program("rollout").step if isinstance(i, MoveObject)}
    assert {"actor weights under adapters", "actor merged weights", "reference weights"} <= moved
    found = next(each for each in workers.run(jobs.swapped, plan.to_json(), str(tmp_path), 3, ranks=2) if each)
    sampling = [entry for entry in found if entry["actor merged weights"][0]]
    others = [entry for entry in found if not entry["actor merged weights"][0]]
    assert len(sampling) >= 3
    assert len(others) >= 3
    for entry in found:
        for name, (measured, planned) in entry.items():
            assert measured <= planned, (name, entry)
    for entry in sampling:
        assert entry["actor weights under adapters"][0] == 0
        assert entry["actor frozen weights"][0] > 0


def test_pools_that_loaded_other_weights_are_told(tmp_path: Path, workers: Workers) -> None:
    plan = plan_of(tmp_path, apart(1, 1))
    for code, message, help_ in workers.run(jobs.refused, plan.to_json(), str(tmp_path), ranks=2):
        assert code == "RLF5018"
        assert "loaded other weights of `actor` than rank 0 of pool `" in message
        assert help_[0] == "put the same checkpoint on every host, or name it by a path that all hosts share"


def test_a_sampler_that_leaves_the_adapters_out_is_told(tmp_path: Path, workers: Workers) -> None:
    plan = plan_of(tmp_path, apart(1, 1))
    found = dict.fromkeys(workers.run(jobs.refused, plan.to_json(), str(tmp_path), True, ranks=2))
    (code, message, _), *_ = (each for each in found if each[0])
    assert (code, message) == (
        "RLF5018",
        "`actor` was trained twice, and its samples still come from the weights before",
    )


def test_an_engine_of_another_pool_keeps_its_frozen_weights_through_sleep(one_thread: None) -> None:
    loaded = rollout_jobs.model("qwen3", lora=True)
    assert loaded.adapters is not None
    engine = RolloutEngine(loaded, "fp32", own=True)
    before = {name: tensor.clone() for name, tensor in engine.local_tensors().items()}
    assert engine.own_bytes() > sum(tensor.nbytes for tensor in before.values())
    engine.sleep(2)
    assert engine.own_bytes() == 0
    engine.wake()
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.local_tensors().items())
    engine.begin_update(1)
    for tensor in engine.incoming().values():
        tensor.fill_(0.5)
    with pytest.raises(RunFailure, match="tensors that the engine does not have") as failure:
        engine.update(engine.local_tensors())
    assert failure.value.code == "RLF5018"
    engine.update(engine.incoming())
    engine.end_update(weights_digest(engine.incoming()))
    layer = "model.layers.0.self_attn.q_proj.weight"
    rank, scaling = loaded.adapters.lora.rank, loaded.adapters.scaling(layer.removesuffix(".weight"))
    torch.testing.assert_close(engine.local_tensors()[layer], before[layer] + 0.25 * rank * scaling)


def test_layers_without_rules_are_refused_by_name() -> None:
    loaded = load_model(TinyModel(architecture="qwen3", alphabet="01"), Path())
    loaded.model.model.layers[0].extra = torch.nn.Linear(8, 8)
    adapters = Adapters(loaded.model, Lora(rank=2, alpha=2.0, targets="all_linear"))
    with pytest.raises(RunFailure, match="adapters of a model of type `qwen3` cannot be moved") as failure:
        known_adapters(adapters, catalogue_of(loaded.model.config))
    assert failure.value.code == "RLF4003"
    assert failure.value.notes == ("no rule says how the adapter of `model.layers.0.extra` is divided",)
