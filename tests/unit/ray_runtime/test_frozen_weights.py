"""Which weights are laid out anew for the matrix unit: those that nothing writes or moves, and no others.

An implementation of the kernel that notes what it is given stands for the NPU's; `tests/npu` has the real one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from rlflow.backends.ray_runtime.execute import Interpreter
from rlflow.backends.ray_runtime.frozen_weights import cast_frozen, is_frozen
from rlflow.backends.ray_runtime.kernels.format_cast import format_cast
from rlflow.backends.ray_runtime.measure import StepMetrics
from rlflow.backends.ray_runtime.state import ModelState, RankState
from rlflow.driver import compile
from tests.unit.ray_runtime.conftest import FakeReward

SIZES = "hidden = 64, layers = 2, intermediate = 128"
FLOW = """\
flow sums {
  data   questions = jsonl("data.jsonl", prompt = "question", answer = "answer")
  model  actor     = tiny(qwen3, alphabet = "0123456789+=", SIZES, compute = COMPUTE)
  model  other     = FROZEN
  reward exact     = python("rewards:score")
  step {
    batch   = questions.take(4 prompts)
    samples = actor.generate(batch, n = 4, max_new = 8 tokens)
    ref     = other.logprobs(samples)
    adv     = group_normalize(exact(samples))
    actor.train(samples, advantages = adv, reference = ref, loss = ppo_clip(0.2) + 0.01 * kl(k3),
                minibatch = 8 samples, optimizer = adamw(lr = 2e-3))
  }
  stop after 2 steps
}
schedule sums {
  pool main = 1 devices { POOL }
}
"""
APART = """
schedule sums on pair {
  pool one = 1 devices
  pool two = 1 devices
  place actor.train on one
  place actor.generate, other on two
}
cluster pair { host = 2 * cpu { memory = 64 GiB, cpus = 8 } }
"""
TEACHER = 'tiny(qwen3, alphabet = "0123456789+=", SIZES, compute = COMPUTE)'
LINEAR = 2 * 7
"""Of both layers: four of attention, three of the MLP. The head is tied to the embedding."""

Loaded = Callable[..., RankState]
Noted = list[torch.Tensor]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """What the kernel is given; it gives a copy, as the NPU's does."""
    seen: Noted = []

    def cast(weight: torch.Tensor) -> torch.Tensor:
        seen.append(weight)
        return weight.clone()

    monkeypatch.setitem(format_cast.implementations, "noted", cast)
    monkeypatch.setenv("RLFLOW_KERNELS", "format_cast=noted")
    return seen


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(3)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (tmp_path / "rewards.py").write_text("def score(response):\n    return 0.0\n", "utf-8")

    def load(frozen: str = "frozen(actor)", compute: str = "bf16", pool: str = "", sizes: str = SIZES) -> RankState:
        text = FLOW.replace("FROZEN", frozen).replace("SIZES", sizes).replace("COMPUTE", compute).replace("POOL", pool)
        (tmp_path / "sums.rlflow").write_text(text, "utf-8")
        state = RankState(compile(tmp_path / "sums.rlflow"), "main", 0, 1, tmp_path, seed=0)
        state.load_models()
        state.load_data()
        state.rewards = {"exact": FakeReward(lambda text: float(len(set(text))))}  # type: ignore[dict-item]
        return state

    return load


def linear(state: RankState, name: str) -> list[nn.Linear]:
    model = state.models[name].loaded.model
    return [module for module in model.get_decoder().modules() if isinstance(module, nn.Linear)]


def types(state: RankState, name: str) -> set[torch.dtype]:
    return {module.weight.dtype for module in linear(state, name)}


def losses(state: RankState) -> list[tuple[float, ...]]:
    interpreter, out = Interpreter(state, lambda step: None), []
    for step in (1, 2):
        metrics = StepMetrics(state.plan, "main", 0)
        interpreter.run(state.plan.programs[0].step, step, metrics)
        out.append(tuple(metrics.means[name][0] for name in ("actor/loss", "actor/grad_norm", "actor/kl_loss")))
    return out


@pytest.mark.parametrize("frozen", ["frozen(actor)", TEACHER])
def test_what_is_frozen_is_cast_and_what_is_trained_is_not(frozen: str, loaded: Loaded, noted: Noted) -> None:
    state = loaded(frozen)
    assert [tuple(weight.shape) for weight in noted] == [tuple(m.weight.shape) for m in linear(state, "other")]
    assert len(noted) == LINEAR
    assert types(state, "other") == {torch.bfloat16}
    assert types(state, "actor") == {torch.float32}
    others = [p for n, p in state.models["other"].loaded.model.named_parameters() if "proj" not in n]
    assert {p.dtype for p in others} == {torch.float32}


def test_the_numbers_of_a_run_stay(loaded: Loaded, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    cast = losses(loaded())
    assert len(noted) == LINEAR
    monkeypatch.delenv("RLFLOW_KERNELS")
    assert cast == losses(loaded())
    assert cast[1][2] > 0, "the policy has left the reference"


def test_what_a_pool_swaps_is_not_cast(loaded: Loaded, noted: Noted) -> None:
    loaded(pool="memory = 9 MiB")
    assert noted == []
    loaded(pool="memory = 100 MiB")
    assert len(noted) == LINEAR


def test_a_reference_on_the_tensors_of_a_policy_with_adapters_is_not_cast(loaded: Loaded, noted: Noted) -> None:
    loaded(sizes=f"{SIZES}, lora = lora(rank = 4, targets = attention)")
    assert noted == []


def test_what_a_reshard_writes_on_another_pool_is_not_frozen_there(tmp_path: Path, loaded: Loaded) -> None:
    here = loaded()
    text = (tmp_path / "sums.rlflow").read_text("utf-8").partition("schedule")[0]
    (tmp_path / "apart.rlflow").write_text(text + APART, "utf-8")
    plan = compile(tmp_path / "apart.rlflow")
    assert [reshard.model for reshard in plan.reshards if reshard.target == "two"] == ["actor"]
    there = RankState(plan, "two", 0, 1, tmp_path, seed=0)
    source = here.models["other"]
    for name in ("actor", "other"):
        there.models[name] = ModelState(copy.deepcopy(source.loaded), "bf16", source.config, source.parameters)
    assert [name for name in there.models if is_frozen(there, name)] == ["other"]


def test_fp32_is_not_cast(loaded: Loaded, noted: Noted) -> None:
    state = loaded(compute="fp32")
    assert noted == []
    assert types(state, "other") == {torch.float32}


def test_a_weight_of_other_sizes_stays(loaded: Loaded, noted: Noted) -> None:
    state = loaded(sizes="hidden = 64, layers = 2, intermediate = 120")
    assert len(noted) == 2 * 4
    assert types(state, "other") == {torch.bfloat16, torch.float32}


def test_without_the_kernel_nothing_changes(loaded: Loaded) -> None:
    state = loaded()
    assert cast_frozen(state) == {}
    assert types(state, "other") == {torch.float32}
