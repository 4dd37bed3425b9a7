"""Flows with adapters through compiler and interpreter, without Ray."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.checkpoint import load_checkpoint, save_checkpoint, weights_digest
from rlflow.backends.ray_runtime.execute import Interpreter
from rlflow.backends.ray_runtime.measure import StepMetrics, reduce_parts
from rlflow.backends.ray_runtime.published import PublishCheck
from rlflow.backends.ray_runtime.reward_worker import Handle
from rlflow.backends.ray_runtime.saving.pieces import shapes_in
from rlflow.backends.ray_runtime.state import RankState
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.driver import compile
from rlflow.plan import Plan

FLOW = """\
flow sums {
  data   questions = jsonl("sums.jsonl", answer = "answer")
  model  actor     = tiny(qwen3, alphabet = "0123456789+=", hidden = 32, layers = 1, context = 32 tokens,
                          compute = COMPUTE, lora = lora(rank = 4, targets = attention))
  model  reference = frozen(actor)
  reward exact     = python("rewards:score")
  step {
    batch   = questions.take(8 prompts)
    samples = actor.generate(batch, n = 4, max_new = 4 tokens)
    ref     = reference.logprobs(samples)
    actor.train(samples, advantages = group_normalize(exact(samples)), reference = ref,
                loss = ppo_clip(0.2) + 0.01 * kl(k3), optimizer = adamw(lr = RATE))
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


def plan_of(folder: Path, compute: str = "fp32", rate: float = 1e-2) -> Plan:
    rows = [f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(4) for b in range(4)]
    (folder / "sums.jsonl").write_text("".join(rows), "utf-8")
    (folder / "rewards.py").write_text("def score(response):\n    return 0.0\n", "utf-8")
    (folder / "sums.rlflow").write_text(FLOW.replace("COMPUTE", compute).replace("RATE", str(rate)), "utf-8")
    return compile(folder / "sums.rlflow")


def state_of(folder: Path, compute: str = "fp32", rate: float = 1e-2) -> RankState:
    state = RankState(plan_of(folder, compute, rate), "main", 0, 1, folder, seed=0)
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


def test_the_reference_is_the_first_policy_and_stays(tmp_path: Path) -> None:  # I9
    """KL is exactly 0 at the first step, and grows; the reference's tensors are those of the actor."""
    state = state_of(tmp_path)
    adapters = state.models["actor"].loaded.adapters
    assert adapters is not None
    theirs, base = (
        {parameter.data_ptr() for parameter in model.parameters()}
        for model in (state.models["reference"].loaded.model, adapters.base)
    )
    assert theirs == base
    before = adapters.base_digest()
    found = run_steps(state, 1, 3)
    assert found[0]["actor/kl_loss"] == 0.0
    assert found[2]["actor/kl_loss"] > 1e-5
    adapters._digest = ""
    assert adapters.base_digest() == before


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_every_publish_reaches_the_sampler(tmp_path: Path, compute: str) -> None:  # T10
    state = state_of(tmp_path, compute)
    engine = state.models["actor"].engine
    assert engine is not None
    digests = [engine.digest]
    for step in range(1, 4):
        run_steps(state, step, step)
        digests.append(engine.digest)
    assert len(set(digests)) == 4
    assert (engine.version, state.models["actor"].version) == (3, 3)
    prompts = state.data["questions"].all().select(np.arange(4))
    op = next(s.op for s in state.plan.stages if s.op.kind == "generate")
    samples = engine.generate(prompts, op, seed=1, step=9, version=3)  # type: ignore[arg-type]
    trainer = state.models["actor"].trainer
    assert trainer is not None
    tolerance = 1e-4 if compute == "fp32" else 0.1
    torch.testing.assert_close(
        trainer.logprobs(samples, 1.0).values, samples.packed("logprobs").values, atol=tolerance, rtol=0
    )


def test_a_publish_that_changes_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler gets the frozen weights every time: the first publish may be small, the second is RLF5018."""
    state = state_of(tmp_path)
    model = state.models["actor"]
    assert model.loaded.adapters is not None
    base = {name: layer.get_base_layer().weight for name, layer in model.loaded.adapters._layers.items()}
    monkeypatch.setattr(model.loaded.adapters, "effective", lambda: iter(base.items()))
    run_steps(state, 1, 1)
    with pytest.raises(RunFailure, match="its samples still come from the weights before") as failure:
        run_steps(state, 2, 2)
    assert failure.value.code == "RLF5018"


def test_a_step_without_a_learning_rate_may_publish_the_same(tmp_path: Path) -> None:
    state = state_of(tmp_path, rate=0.0)
    assert len(run_steps(state, 1, 4)) == 4


def test_the_check_counts_unchanged_publishes_in_a_row() -> None:
    check = PublishCheck("actor", "a")
    for digest, moved in (("a", True), ("b", True), ("b", True), ("b", False), ("b", True), ("c", True), ("c", True)):
        check.publish(digest, moved)
    with pytest.raises(RunFailure, match="`actor` was trained twice"):
        check.publish("c", True)
    check.restart("d")
    check.publish("d", True)


def test_a_checkpoint_holds_adapters_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = state_of(tmp_path)
    expected = run_steps(straight, 1, 4)
    first = state_of(tmp_path)
    run_steps(first, 1, 2)
    folder = save_checkpoint(first, tmp_path / "checkpoints", 2)
    assert sorted(p.name for p in (folder / "actor").iterdir() if p.suffix != ".jinja") == [
        "adapter",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    weights = sum(p.numel() for p in first.models["reference"].loaded.model.parameters())
    shapes = shapes_in(folder / "actor.training")
    assert 0 < sum(math.prod(shape) for name, shape in shapes.items() if name.endswith(".exp_avg")) < weights / 4
    second = state_of(tmp_path)
    load_checkpoint(second, tmp_path / "checkpoints", 2)
    found = run_steps(second, 3, 4)
    for key in ("actor/loss", "actor/kl_loss", "actor/grad_norm"):
        assert [row[key] for row in found] == [row[key] for row in expected[2:]]
    assert weights_digest(second) == weights_digest(straight)
    assert second.models["actor"].engine.digest == straight.models["actor"].engine.digest  # type: ignore[union-attr]


def test_the_last_checkpoint_has_the_merged_weights_too(tmp_path: Path) -> None:
    state = state_of(tmp_path)
    run_steps(state, 1, 2)
    assert state.has_adapters
    folder = save_checkpoint(state, tmp_path / "checkpoints", 2, merged=True) / "actor"
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[1, 10, 2, 11]])
    with torch.no_grad():
        expected = state.models["actor"].loaded.model(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert json.loads((folder / "adapter" / "adapter_config.json").read_text("utf-8"))["r"] == 4
    load_checkpoint(state_of(tmp_path), tmp_path / "checkpoints", 2)


def test_adapters_alone_learn(tmp_path: Path) -> None:
    scores = [row["critic/score/mean"] for row in run_steps(state_of(tmp_path, rate=2e-2), 1, 40)]
    assert np.mean(scores[-5:]) > np.mean(scores[:5]) + 0.25


def test_the_plan_says_what_the_sampler_holds(tmp_path: Path) -> None:
    for compute in ("fp32", "bf16"):
        plan = plan_of(tmp_path, compute)
        assert [channel.transport for channel in plan.channels] == ["merge"]
        assert Plan.from_json(plan.to_json()) == plan
