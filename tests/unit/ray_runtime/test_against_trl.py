"""One GRPO step beside trl's own: advantages, loss and every gradient, on the tensors that trl itself sampled.

Runs where trl is installed (it is no dependency); written against trl 1.16.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.algorithms.advantages import group_normalize
from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.models import LoadedModel, load_model
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.ir.ops import AdamW, Kl, LossTerm, PpoClip, TinyModel, Train

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

ALPHABET = "0123456789+="
MAX_NEW = 12


def ours() -> LoadedModel:
    loaded = load_model(TinyModel(architecture="qwen3", alphabet=ALPHABET, hidden=32), Path())
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(2.0)
    return loaded


def trl_trainer(loaded: LoadedModel, folder: Path, rewards: list[float], **settings: Any) -> Any:
    def reward(completions: list[str], **_: Any) -> list[float]:
        scores = [float(len(text) % 5) if index < 12 else 2.0 for index, text in enumerate(completions)]
        rewards.extend(scores)
        return scores

    config = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=MAX_NEW,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        # trl 1.16 multiplies the KL term by the ratio unless told not to; ours is the plain estimator of the paper.
        use_bias_correction_kl=False,
        seed=3,
        **settings,
    )
    rows = [{"prompt": text} for text in ("1+2=", "34+5=", "7+88=", "100+2=")]
    return trl.GRPOTrainer(
        model=loaded.model,
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=loaded.tokenizer,
    )


def packed(values: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype) -> Packed:
    return Packed.from_rows([row[keep.bool()] for row, keep in zip(values, mask, strict=True)], dtype)


@pytest.mark.parametrize(
    ("loss_type", "aggregate", "scale"),
    [
        ("dapo", "token_mean", 1.0),
        ("grpo", "seq_mean_token_mean", 1.0),
        # trl divides the sums by a constant, the longest response allowed, as Dr. GRPO writes it
        ("dr_grpo", "seq_mean_token_sum", 1.0 / MAX_NEW),
    ],
)
@pytest.mark.parametrize(
    ("beta", "temperature", "off_policy"), [(0.0, 1.0, False), (0.04, 1.0, True), (0.0, 0.7, True)]
)
def test_one_grpo_step(
    loss_type: str,
    aggregate: Any,
    scale: float,
    beta: float,
    temperature: float,
    off_policy: bool,
    tmp_path: Path,
    record_testsuite_property: Any,
) -> None:
    mine = ours()
    theirs = LoadedModel(copy.deepcopy(mine.model), mine.tokenizer, mine.eos_ids, mine.pad_id, mine.context)
    theirs.model.set_attn_implementation("sdpa")
    rewards: list[float] = []
    # trl loads a reference by name when beta is not 0, which a model made on the fly has not; its log-probs are given
    # to the loss below.
    trainer = trl_trainer(theirs, tmp_path, rewards, beta=0.0, loss_type=loss_type, temperature=temperature)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    prompts = [row for row in trainer.train_dataset for _ in range(4)]
    inputs = trainer._generate_and_score_completions(prompts)

    # --- advantages
    groups = np.repeat(np.arange(4), 4)
    advantages = group_normalize(np.array(rewards[-16:]), groups, std=True, epsilon=1e-4)
    advantage_error = float(np.abs(advantages - inputs["advantages"].numpy()).max())
    assert np.abs(advantages).max() > 0.5
    assert not advantages[12:].any()  # a group of equal rewards

    # --- loss and gradients on trl's tensors
    mask = inputs["completion_mask"]
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * 0.3
    samples = Batch(
        16,
        {
            "prompt_ids": packed(inputs["prompt_ids"], inputs["prompt_mask"], torch.int64),
            "response_ids": packed(inputs["completion_ids"], mask, torch.int64),
        },
    )
    current = Trainer(mine, "fp32").logprobs(samples, temperature)
    around = Packed(current.values + packed(noise, mask, torch.float32).values, current.offsets)
    padded = torch.zeros(mask.shape)
    padded[mask.bool()] = around.values
    if off_policy:
        inputs["old_per_token_logps"] = padded
    if beta:
        trainer.beta = beta
        inputs["ref_per_token_logps"] = padded.flip(0) * mask  # another plausible set; packed again below
    reference = packed(inputs["ref_per_token_logps"], mask, torch.float32) if beta else None
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()

    terms: tuple[LossTerm, ...] = (PpoClip(weight=scale, clip_low=0.2, clip_high=0.2),)
    if beta:
        terms = (*terms, Kl(weight=beta * scale, estimator="k3"))
    op = Train(
        model="actor",
        loss=terms,
        optimizer=AdamW(lr=1e-3),
        minibatch=0,
        aggregate=aggregate,
        max_grad_norm=0.0,
        temperature=temperature,
    )
    metrics = Trainer(mine, "fp32").train(
        samples, advantages, op, reference=reference, old=around if off_policy else None, seed=0, step=0
    )
    found = {name: p.grad for name, p in mine.model.named_parameters()}
    expected = {name: p.grad for name, p in theirs.model.named_parameters()}
    assert found.keys() == expected.keys()
    gradient_error = max(float((found[name] - expected[name]).abs().max()) for name in found)
    largest = max(float(value.abs().max()) for value in expected.values())
    loss_error = abs(metrics["actor/loss"] - loss.item())
    record_testsuite_property(
        f"{loss_type} beta={beta} temperature={temperature}",
        f"max abs difference: advantages {advantage_error:.1e}, loss {loss_error:.1e} of {loss.item():.4f}, "
        f"gradients {gradient_error:.1e} of {largest:.1e}",
    )
    assert advantage_error < 1e-6
    assert loss_error < 1e-6
    assert largest > 1e-3
    assert gradient_error < 1e-5 * max(1.0, largest)
