"""Whole flows through compiler and interpreter, without Ray: every family of stages together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.execute import Interpreter
from rlflow.backends.ray_runtime.measure import StepMetrics, reduce_parts
from rlflow.backends.ray_runtime.reward_worker import Handle
from rlflow.backends.ray_runtime.state import RankState
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.driver import compile

NAN = float("nan")
FLOW = """\
flow sums {{
  data   questions = jsonl("sums.jsonl", answer = "answer")
  model  actor     = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1, context = 32 tokens)
  reward exact     = python("rewards:score")
  {declarations}
  step {{
    batch   = questions.take(8 prompts)
    samples = actor.generate(batch, n = 4, max_new = 4 tokens)
    {step}
  }}
  stop after 5 steps
}}
"""
LEARN = "optimizer = adamw(lr = 1e-2)"


class FakeReward:
    ended = 0.0  # when a function returned: these run none

    def __init__(self, function: Callable[[str], float]) -> None:
        self.function = function

    def start(self, samples: Batch) -> Handle:
        return Handle((), tuple(samples.items("text")))

    def collect(self, handle: Handle) -> tuple[np.ndarray, dict[str, list[Any]]]:
        return np.array([self.function(text) for text in handle.refs], dtype=np.float32), {}

    def close(self) -> None:
        pass


def distinct(text: str) -> float:
    return float(len(set(text)))


def state_of(folder: Path, declarations: str, step: str, score: Callable[[str], float] = distinct) -> RankState:
    rows = [f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(4) for b in range(4)]
    (folder / "sums.jsonl").write_text("".join(rows), "utf-8")
    (folder / "rewards.py").write_text("def score(response):\n    return 0.0\n", "utf-8")
    (folder / "sums.rlflow").write_text(FLOW.format(declarations=declarations, step=step), "utf-8")
    state = RankState(compile(folder / "sums.rlflow"), "main", 0, 1, folder, seed=0)
    state.load_models()
    state.load_data()
    state.rewards = {"exact": FakeReward(score)}  # type: ignore[dict-item]
    return state


def run_steps(state: RankState, steps: int) -> list[dict[str, float]]:
    interpreter = Interpreter(state, lambda step: None)
    out = []
    for step in range(1, steps + 1):
        metrics = StepMetrics(state.plan, "main", 0)
        interpreter.run(state.plan.programs[0].step, step, metrics)
        out.append(reduce_parts([metrics.parts()]))
    return out


def test_ppo_with_a_critic_learns(tmp_path: Path) -> None:
    state = state_of(
        tmp_path,
        "model reference = frozen(actor)\n  model critic = value(actor)",
        f"""ref = reference.logprobs(samples)
    v = critic.values(samples)
    r = kl_reward(exact(samples), samples, reference = ref, weight = 0.01)
    critic.train(samples, returns = returns(r, v), values = v, loss = value_clip(0.5), {LEARN})
    actor.train(samples, advantages = gae(r, v), loss = ppo_clip(0.2), {LEARN})""",
    )
    found = run_steps(state, 25)
    assert found[0]["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-6)  # the first values are all 0
    assert found[-1]["critic/vf_loss"] < 0.5 * found[0]["critic/vf_loss"]
    assert found[-1]["critic/rewards/mean"] > found[0]["critic/rewards/mean"]
    assert {"critic/grad_norm", "critic/lr", "critic/vf_clipfrac", "actor/grad_norm", "actor/entropy"} <= set(found[0])
    assert {"timing_s/values", "timing_s/update_critic", "timing_s/update_actor", "timing_s/adv"} <= set(found[0])
    assert state.models["critic"].version == 25
    assert torch.get_num_threads() == 1  # models this small


def test_kl_in_the_reward_is_zero_at_first(tmp_path: Path) -> None:
    state = state_of(
        tmp_path,
        "model reference = frozen(actor)\n  model critic = value(actor)",
        f"""ref = reference.logprobs(samples)
    v = critic.values(samples)
    r = kl_reward(exact(samples), samples, reference = ref, weight = 1.0)
    critic.train(samples, returns = returns(r, v), values = v, loss = value_clip(none), {LEARN})
    actor.train(samples, advantages = gae(r, v), loss = ppo_clip(0.2), {LEARN})""",
    )
    found = run_steps(state, 5)
    assert found[0]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-5)
    assert found[-1]["actor/reward_kl_penalty"] > 1e-3


def test_distillation_closes_the_gap(tmp_path: Path) -> None:
    state = state_of(
        tmp_path,
        """model teacher = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1, context = 32 tokens,
                       init_seed = 5)""",
        f"""grade = teacher.logprobs(samples)
    actor.train(samples, teacher = grade, loss = distill(), {LEARN})""",
    )
    found = run_steps(state, 30)
    last, first = (np.mean([step["actor/distill_kl"] for step in part]) for part in (found[-5:], found[:5]))
    assert last < 0.5 * first


GSPO = f"""adv = group_normalize(exact(samples))
    actor.train(samples, advantages = adv, loss = gspo(0.1), {LEARN})"""


def test_a_missing_reward_leaves_the_sample_out(tmp_path: Path) -> None:  # K5
    found = run_steps(state_of(tmp_path, "", GSPO, lambda text: NAN if "1" in text else float(len(text))), 2)
    assert all(np.isfinite(value) for step in found for value in step.values())
    assert found[0]["training/samples_without_reward"] > 0
    nothing = run_steps(state_of(tmp_path, "", GSPO, lambda text: NAN), 1)[0]
    assert nothing["actor/skipped_updates"] == 1
    assert nothing["critic/skipped_groups"] == 8


def test_several_rewards_and_samplings_have_names_of_their_own(tmp_path: Path) -> None:
    state = state_of(
        tmp_path,
        "",
        f"""score = exact(samples)
    greedy = actor.generate(batch, n = 1, max_new = 4 tokens, temperature = 0)
    base = exact(greedy)
    actor.train(samples, advantages = remax(score, base), loss = ppo_clip(0.2), {LEARN})""",
    )
    found = run_steps(state, 1)[0]
    assert found["critic/score/mean"] == found["reward/score/mean"]
    assert {"reward/base/mean", "greedy/response_length/mean", "response_length/mean"} <= set(found)


def test_two_trained_policies_keep_their_metrics_apart(tmp_path: Path) -> None:
    other = 'model other = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1, context = 32 tokens)'
    step = f"""adv = group_normalize(exact(samples))
    actor.train(samples, advantages = adv, loss = ppo_clip(0.2), {LEARN})
    other.train(samples, loss = nll(), {LEARN})"""
    found = run_steps(state_of(tmp_path, other, step), 1)[0]
    assert {"actor/actor/loss", "actor/other/loss"} <= set(found)


def test_tokenizers_that_differ_are_refused(tmp_path: Path) -> None:
    other = 'model teacher = tiny(qwen3, alphabet = "+=0123456789", hidden = 32, layers = 1, context = 32 tokens)'
    step = f"""grade = teacher.logprobs(samples)
    actor.train(samples, teacher = grade, loss = distill(), {LEARN})"""
    with pytest.raises(RunFailure, match="`teacher` reads the tokens of `actor`, and their tokenizers differ"):
        state_of(tmp_path, other, step)
