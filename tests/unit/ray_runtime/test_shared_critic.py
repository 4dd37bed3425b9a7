"""A value head on the policy's own body: one pass, one loss, one optimizer, one set of weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.checkpoint import load_checkpoint, save_checkpoint, weights_digest
from rlflow.backends.ray_runtime.execute import Interpreter
from rlflow.backends.ray_runtime.heads import VALUE_HEAD, ValueHeadModel
from rlflow.backends.ray_runtime.measure import StepMetrics, reduce_parts
from rlflow.backends.ray_runtime.models import LoadedModel, derive, load_model
from rlflow.backends.ray_runtime.reward_worker import Handle
from rlflow.backends.ray_runtime.state import RankState
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.driver import compile
from rlflow.ir.ops import AdamW, Lora, LossTerm, PpoClip, TinyModel, Train, ValueClip

pytestmark = pytest.mark.usefixtures("one_thread")

LORA = Lora(rank=4, alpha=8.0, targets="all_linear")


def pair(lora: Lora | None = None) -> tuple[LoadedModel, LoadedModel]:
    """A policy and the critic on its body, with a head that is not 0."""
    policy = load_model(
        TinyModel(architecture="qwen3", alphabet="0123456789+=", hidden=32, layers=1, lora=lora), Path()
    )
    critic = derive(policy, "shared")
    with torch.no_grad():
        critic.model.head.weight.copy_(torch.linspace(-0.3, 0.3, 32)[None])
    return policy, critic


def samples_of(rows: list[tuple[int, int]]) -> Batch:
    rng = np.random.default_rng(1)
    columns = {
        "prompt_ids": Packed.from_rows([rng.integers(0, 12, p).tolist() for p, _ in rows], torch.int64),
        "response_ids": Packed.from_rows([rng.integers(0, 14, r).tolist() for _, r in rows], torch.int64),
    }
    return Batch(len(rows), columns)


SAMPLES = samples_of([(4, 3), (1, 9), (7, 1), (3, 5)])
OFFSETS = SAMPLES.packed("response_ids").offsets
RETURNS = Packed(torch.linspace(-1, 1, int(OFFSETS[-1])), OFFSETS)
ADVANTAGES = np.array([1.0, -0.5, 0.3, -1.0], dtype=np.float32)
POLICY, VALUE = PpoClip(weight=1.0, clip_low=0.2, clip_high=0.2), ValueClip(weight=0.5, clip=None)


def train(trainer: Trainer, terms: tuple[LossTerm, ...], lr: float = 0.0) -> dict[str, float]:
    op = Train(model="m", loss=terms, optimizer=AdamW(lr=lr), minibatch=0, max_grad_norm=0.0, microbatch_tokens=24)
    advantages = ADVANTAGES if any(isinstance(term, PpoClip) for term in terms) else None
    returns = RETURNS if any(isinstance(term, ValueClip) for term in terms) else None
    return trainer.train(SAMPLES, advantages, op, returns=returns, seed=0, step=0)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_gradient_is_the_sum_of_the_two_alone(lora: Lora | None) -> None:
    """Against a policy alone and a value model alone, each on a copy of the same body."""
    policy, critic = pair(lora)
    found = train(Trainer(policy, "fp32"), (POLICY, VALUE))
    joint, head = gradients(policy.model), gradients(critic.model.head)
    alone, _ = pair(lora)
    alone.critic = None
    loss = train(Trainer(alone, "fp32"), (POLICY,))
    expected = gradients(alone.model)
    _, value = pair(lora)
    loss_v = train(Trainer(value, "fp32"), (VALUE,))
    for name, gradient in gradients(value.model.body).items():
        expected["model." + name] = expected["model." + name] + gradient
    assert joint.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(joint[name], gradient, atol=1e-6, rtol=1e-4)
    for name, gradient in gradients(value.model.head).items():
        torch.testing.assert_close(head[name], gradient, atol=1e-6, rtol=1e-4)
    assert found["actor/loss"] == pytest.approx(loss["actor/loss"] + loss_v["critic/loss"], abs=1e-6)
    assert found["critic/vf_loss"] == pytest.approx(loss_v["critic/vf_loss"], abs=1e-6)
    assert found["actor/pg_loss"] == pytest.approx(loss["actor/pg_loss"], abs=1e-6)


def test_the_body_is_one() -> None:
    policy, critic = pair()
    assert isinstance(critic.model, ValueHeadModel)
    assert critic.model.body is policy.model.model
    assert policy.critic is critic.model
    assert (critic.critic, critic.adapters) == (None, None)
    trainer = Trainer(policy, "fp32")
    before = Trainer(critic, "fp32").values(SAMPLES).values
    head = critic.model.head.weight.detach().clone()
    first = train(trainer, (POLICY, VALUE), lr=3e-3)
    for _ in range(20):
        last = train(trainer, (POLICY, VALUE), lr=3e-3)
    assert last["critic/vf_loss"] < 0.5 * first["critic/vf_loss"]
    assert not torch.equal(critic.model.head.weight, head)
    after = Trainer(critic, "fp32").values(SAMPLES).values
    assert (after - RETURNS.values).square().mean() < 0.5 * (before - RETURNS.values).square().mean()
    states = trainer.state_dict()["optimizer"]["state"]
    assert len(states) == len(list(policy.model.parameters())) + 2


def test_a_frozen_copy_has_neither_head_nor_tensors_in_common() -> None:
    policy, _ = pair()
    frozen = derive(policy, "frozen")
    assert frozen.critic is None
    assert {p.data_ptr() for p in frozen.model.parameters()}.isdisjoint(p.data_ptr() for p in policy.model.parameters())


# --- flows ------------------------------------------------------------------------------------------------------------

FLOW = """\
flow sums {
  data   questions = jsonl("sums.jsonl", answer = "answer")
  model  critic    = value(actor, shared = true)
  model  actor     = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1, context = 32 tokens, lora = LORA)
  reward exact     = python("rewards:score")
  step {
    batch   = questions.take(8 prompts)
    samples = actor.generate(batch, n = 4, max_new = 4 tokens)
    v       = critic.values(samples)
    points  = exact(samples)
    actor.train(samples, advantages = gae(points, v), returns = returns(points, v), values = v,
                loss = ppo_clip(0.2) + 0.5 * value_clip(0.2), minibatch = 16 samples, optimizer = adamw(lr = 1e-2))
  }
  stop after 5 steps
}
"""


class Distinct:
    """A reward: the number of different characters."""

    ended = 0.0  # when a function returned: these run none

    def start(self, samples: Batch) -> Handle:
        return Handle((), tuple(samples.items("text")))

    def collect(self, handle: Handle) -> tuple[np.ndarray, dict[str, list[Any]]]:
        return np.array([float(len(set(text))) for text in handle.refs], dtype=np.float32), {}

    def close(self) -> None:
        pass


def state_of(folder: Path, lora: str) -> RankState:
    rows = [f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(4) for b in range(4)]
    (folder / "sums.jsonl").write_text("".join(rows), "utf-8")
    (folder / "rewards.py").write_text("def score(response):\n    return 0.0\n", "utf-8")
    (folder / "sums.rlflow").write_text(FLOW.replace("LORA", lora), "utf-8")
    state = RankState(compile(folder / "sums.rlflow"), "main", 0, 1, folder, seed=0)
    state.load_models()
    state.load_data()
    state.rewards = {"exact": Distinct()}  # type: ignore[dict-item]
    return state


def run_steps(state: RankState, first: int, last: int) -> list[dict[str, float]]:
    interpreter = Interpreter(state, lambda step: None)
    out = []
    for step in range(first, last + 1):
        metrics = StepMetrics(state.plan, "main", 0)
        interpreter.run(state.plan.programs[0].step, step, metrics)
        out.append(reduce_parts([metrics.parts()]))
    return out


@pytest.mark.parametrize("lora", ["none", "lora(rank = 4)"])
def test_ppo_with_one_body_learns_and_resumes_bit_for_bit(tmp_path: Path, lora: str) -> None:
    straight = state_of(tmp_path, lora)
    expected = run_steps(straight, 1, 14)
    assert {"actor/loss", "actor/pg_loss", "critic/vf_loss", "critic/vf_explained_var"} <= expected[0].keys()
    assert "critic/loss" not in expected[0]
    scores = [row["critic/score/mean"] for row in expected]
    assert np.mean(scores[-3:]) > np.mean(scores[:3]) + 0.3
    assert straight.models["critic"].version == straight.models["actor"].version == 14
    first = state_of(tmp_path, lora)
    run_steps(first, 1, 2)
    folder = save_checkpoint(first, tmp_path / "checkpoints", 2)
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["actor", "actor.training"]
    assert (folder / "actor" / VALUE_HEAD).is_file()
    second = state_of(tmp_path, lora)
    load_checkpoint(second, tmp_path / "checkpoints", 2)
    found = run_steps(second, 3, 5)
    for key in ("actor/loss", "critic/vf_loss", "critic/score/mean"):
        assert [row[key] for row in found] == [row[key] for row in expected[2:5]]
    critic = second.models["critic"].loaded.model
    assert copy.deepcopy(critic.head.weight).abs().sum() > 0
    run_steps(first, 3, 5)
    assert weights_digest(first) == weights_digest(second)
    head = first.models["critic"].loaded.model.head
    assert torch.equal(head.weight, critic.head.weight)
