"""The same random tensors through the loss functions of trl's trainers. Runs where trl is installed; trl 1.16.

The trainers' own methods are called on a stand-in for the trainer, which holds the settings and hands out log-probs
instead of running a model. Tests named `differs` pin places where trl does something else; the reason stands in each.
`pytest -rP` prints the largest differences.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.algorithms.aggregate import Aggregate, aggregate, token_weights
from rlflow.backends.ray_runtime.algorithms.correction import importance_weights
from rlflow.backends.ray_runtime.algorithms.distill import Kind, divergence
from rlflow.backends.ray_runtime.algorithms.group import rloo, valid_group_normalize
from rlflow.backends.ray_runtime.algorithms.kl import kl_estimate
from rlflow.backends.ray_runtime.algorithms.losses import ppo_clip
from rlflow.backends.ray_runtime.algorithms.policy import cispo, decoupled_ppo, ppo_dual_clip
from rlflow.backends.ray_runtime.algorithms.preference import dpo, ipo
from rlflow.backends.ray_runtime.algorithms.rows import row_ids, row_means, row_sums
from rlflow.backends.ray_runtime.algorithms.sequence import gspo, sequence_ppo_clip
from rlflow.backends.ray_runtime.algorithms.shaping import soft_overlong_penalty
from rlflow.backends.ray_runtime.algorithms.token_sum import row_weights, token_sum_weights

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

ROWS, WIDTH = 12, 9
FLOAT32 = 2e-6


class Sample:
    """Random rows in both layouts: `x` packed, `padded(x)` as trl wants it. Float64; tool tokens are masked holes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(9)
        self.lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
        self.inside = torch.arange(WIDTH)[None, :] < self.lengths[:, None]
        self.tool_mask = (torch.rand((ROWS, WIDTH), generator=generator) < 0.75).double()
        self.tool_mask[:, 0] = 1.0
        self.mask = (self.inside * self.tool_mask)[self.inside]
        self.total = float(self.mask.sum())
        count = len(self.mask)
        self.old = -torch.rand(count, generator=generator).double() - 0.05
        self.reference = self.old + 0.3 * torch.randn(count, generator=generator)
        self.logp = (self.old + 0.4 * torch.randn(count, generator=generator)).requires_grad_()
        self.per_row = torch.randn(ROWS, generator=generator).double()
        self.advantages = self.per_row[row_ids(self.lengths)]

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros((ROWS, WIDTH), dtype=values.dtype).index_put((self.inside,), values)

    def weights(self, how: Aggregate) -> torch.Tensor:
        return token_weights(self.lengths, how, total_tokens=self.total, total_rows=ROWS, mask=self.mask)


def close(name: str, ours: torch.Tensor, theirs: torch.Tensor, limit: float = FLOAT32) -> None:
    found = float((ours - theirs).abs().max())
    print(f"DIFF trl {name}: {found:.1e} of {float(theirs.abs().max()):.3g}")
    assert found <= limit * max(1.0, float(theirs.abs().max()))


def with_slope(loss: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(loss, at, retain_graph=True)
    return torch.cat([loss.detach().reshape(1), slope.reshape(-1)])


def one_process() -> Any:
    def same(x: torch.Tensor, **_: Any) -> torch.Tensor:
        return x

    return SimpleNamespace(num_processes=1, device="cpu", reduce=same, gather=same, gather_for_metrics=same)


def stand_in(s: Sample, **settings: Any) -> Any:
    """What GRPOTrainer._compute_loss and RLOOTrainer._compute_loss read of their trainer."""
    arguments = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    arguments.update({k: settings.pop(k) for k in list(settings) if k in arguments})
    fields = {
        "args": SimpleNamespace(**arguments),
        "model": SimpleNamespace(training=True),
        "accelerator": one_process(),
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "max_completion_length": WIDTH,
        "current_gradient_accumulation_steps": 1,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (s.padded(s.logp), torch.zeros(ROWS, WIDTH), None),
    }
    return SimpleNamespace(**{**fields, **settings})


def grpo(s: Sample, *, inputs: dict[str, Any] | None = None, **settings: Any) -> torch.Tensor:
    given = {
        "prompt_ids": torch.zeros((ROWS, 1), dtype=torch.int64),
        "prompt_mask": torch.ones((ROWS, 1)),
        "completion_ids": torch.zeros((ROWS, WIDTH), dtype=torch.int64),
        "completion_mask": s.inside.double(),
        "tool_mask": s.tool_mask,
        "advantages": s.per_row,
        "old_per_token_logps": s.padded(s.old),
        "ref_per_token_logps": s.padded(s.reference),
        "num_items_in_batch": torch.tensor(s.total),
        **(inputs or {}),
    }
    return trl.GRPOTrainer._compute_loss(stand_in(s, **settings), None, given)


LOSS_TYPES: dict[str, Aggregate | None] = {
    "grpo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": None,
}


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo_losses(loss_type: str, beta: float) -> None:
    s = Sample()
    how = LOSS_TYPES[loss_type]
    weights = (
        token_sum_weights(s.lengths, horizon=WIDTH, total_rows=ROWS, mask=s.mask) if how is None else s.weights(how)
    )
    ours = ppo_clip(s.logp, s.old, s.advantages, 0.2, 0.28).loss + beta * kl_estimate(s.logp, s.reference, "k3")
    theirs = grpo(s, loss_type=loss_type, beta=beta)
    close(f"{loss_type} beta={beta}", with_slope(aggregate(ours, weights), s.logp), with_slope(theirs, s.logp))


def test_micro_batches_of_bnpo_differ() -> None:
    # bnpo divides by the tokens of the micro-batch at hand (T18: not defined over the batch); ours, dapo's, does not.
    s = Sample()
    whole = aggregate(ppo_clip(s.logp, s.old, s.advantages, 0.2, 0.28).loss, s.weights("token_mean"))
    settings = {"loss_type": "bnpo", "current_gradient_accumulation_steps": 2}
    halves = [torch.arange(ROWS) < ROWS // 2, torch.arange(ROWS) >= ROWS // 2]
    cut = [grpo(s, inputs={"tool_mask": s.tool_mask * half[:, None]}, **settings) for half in halves]
    assert abs(float((sum(cut) - whole).detach())) > 1e-3
    settings |= {"loss_type": "dapo", "steps_per_generation": 2}
    cut = [grpo(s, inputs={"tool_mask": s.tool_mask * half[:, None]}, **settings) for half in halves]
    assert float(sum(cut).detach()) == pytest.approx(float(whole.detach()), abs=1e-6)


def test_delta_is_the_dual_clip() -> None:
    s = Sample()
    ours = ppo_dual_clip(s.logp, s.old, s.advantages, 0.2, 0.28, 1.35)
    assert ours.floored.sum() > 0
    theirs = grpo(s, loss_type="dapo", delta=1.35)
    close("delta", with_slope(aggregate(ours.loss, s.weights("token_mean")), s.logp), with_slope(theirs, s.logp))


def test_cispo_counts_its_bound_from_zero() -> None:
    # trl's epsilon_high is the bound itself (no lower one), verl's and ours is the distance from 1.
    s = Sample()
    ours = cispo(s.logp, s.old, s.advantages, None, 0.28).loss
    theirs = grpo(s, loss_type="cispo", epsilon_high=1.28)
    close("cispo", with_slope(aggregate(ours, s.weights("token_mean")), s.logp), with_slope(theirs, s.logp))


def test_gspo() -> None:
    s = Sample()
    ours = gspo(s.logp, s.old, s.per_row, s.lengths, 0.02, 0.03, mask=s.mask)
    assert 0 < ours.clipped.sum() < ROWS
    theirs = grpo(s, importance_sampling_level="sequence", epsilon_low=0.02, epsilon_high=0.03)
    mine = aggregate(ours.loss, row_weights(s.lengths, total_rows=ROWS, mask=s.mask))
    close("gspo", with_slope(mine, s.logp), with_slope(theirs, s.logp))


def test_truncated_importance_sampling() -> None:
    s = Sample()
    found = importance_weights(s.old, s.reference, s.lengths, cap=1.1, mask=s.mask)
    ours = decoupled_ppo(s.logp, s.old, s.advantages, 0.2, 0.28, found.weights).loss
    theirs = grpo(
        s,
        inputs={"importance_sampling_ratio": s.padded(found.weights)},
        loss_type="dapo",
        use_vllm=True,
        vllm_importance_sampling_correction=True,
    )
    close("tis", with_slope(aggregate(ours, s.weights("token_mean")), s.logp), with_slope(theirs, s.logp))


def test_kl_with_bias_correction_differs() -> None:
    # trl 1.16 multiplies k3 by the ratio by default: its gradient is then that of the KL. Ours is GRPO's plain k3.
    s = Sample()
    plain, corrected = (grpo(s, beta=0.1, use_bias_correction_kl=on) for on in (False, True))
    assert abs(float((plain - corrected).detach())) > 1e-4
    ratio = (s.logp - s.old).exp()
    ours = ppo_clip(s.logp, s.old, s.advantages, 0.2, 0.28).loss
    ours = ours + 0.1 * ratio * kl_estimate(s.logp, s.reference, "k3")
    mine = aggregate(ours, s.weights("seq_mean_token_mean"))
    close("bias-corrected kl", with_slope(mine, s.logp), with_slope(corrected, s.logp))


# --- RLOO ------------------------------------------------------------------------------------------------------------


def test_rloo_loss() -> None:
    s = Sample()
    everything = torch.ones_like(s.mask)  # trl's RLOO knows no tool mask
    ours = sequence_ppo_clip(s.logp, s.old, s.per_row, s.lengths, 0.2, 0.28)
    given = {
        "prompt_ids": torch.zeros((ROWS, 1), dtype=torch.int64),
        "prompt_mask": torch.ones((ROWS, 1)),
        "completion_ids": torch.zeros((ROWS, WIDTH), dtype=torch.int64),
        "completion_mask": s.inside.double(),
        "advantages": s.per_row,
        "old_logps": row_sums(s.old, s.lengths),
    }
    theirs = trl.RLOOTrainer._compute_loss(stand_in(s), None, given)
    mine = aggregate(ours.loss, row_weights(s.lengths, total_rows=ROWS, mask=everything))
    close("rloo loss", with_slope(mine, s.logp), with_slope(theirs, s.logp))


@pytest.mark.parametrize("kind", ["RLOO", "GRPO"])
def test_advantages_with_missing_rewards(kind: str, tmp_path: Path) -> None:  # K5
    from rlflow.backends.ray_runtime.models import load_model
    from rlflow.ir.ops import TinyModel

    loaded = load_model(TinyModel(architecture="qwen3", alphabet="0123456789+=", hidden=32), Path())
    scores = [1.0, None, 0.0, 4.0, 2.0, 2.0, 2.0, 2.0, None, None, None, 5.0, 0.3, -1.0, 0.7, None]
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(tmp_path),
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=3,
        report_to=[],
        use_cpu=True,
        bf16=False,
        beta=0.0,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=loaded.model,
        reward_funcs=lambda completions, **_: scores,
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in ("1+2=", "3+5=", "7+8=", "1+1=")]),
        processing_class=loaded.tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    prompts = [row for row in trainer.train_dataset for _ in range(4)]
    theirs = trainer._generate_and_score_completions(prompts)["advantages"].double()
    rewards, groups = np.array(scores, dtype=np.float64), np.repeat(np.arange(4), 4)
    found = rloo(rewards, groups) if kind == "RLOO" else valid_group_normalize(rewards, groups, std=True, epsilon=1e-4)
    close(f"{kind} advantages with missing rewards", torch.from_numpy(found.values), theirs)
    assert found.counted.sum() == (10 if kind == "RLOO" else 11)


# --- preference ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_preference_losses(kind: str) -> None:
    s = Sample()
    half = ROWS // 2
    zeros = torch.zeros(ROWS, WIDTH)
    outputs = SimpleNamespace(log_probs=s.padded(s.logp), entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=one_process(),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        label_smoothing=0.0,
        beta=0.3,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    reduce = row_sums if kind == "sigmoid" else row_means
    sums = row_sums(s.reference, s.lengths)
    shifted = torch.cat([torch.zeros((ROWS, 1)), s.inside.double()], 1)  # the first position is the prompt
    given = {
        "input_ids": torch.zeros((ROWS, WIDTH + 1), dtype=torch.int64),
        "attention_mask": torch.ones((ROWS, WIDTH + 1)),
        "completion_mask": shifted,
        "ref_chosen_logps": sums[:half],
        "ref_rejected_logps": sums[half:],
    }
    theirs = trl.DPOTrainer._compute_loss(trainer, lambda **_: outputs, given, False)
    now, before = reduce(s.logp, s.lengths), reduce(s.reference, s.lengths)
    loss = dpo if kind == "sigmoid" else ipo
    ours = loss(now[:half], now[half:], before[:half], before[half:], beta=0.3)
    close(f"dpo {kind}", with_slope(ours.loss.mean(), s.logp), with_slope(theirs, s.logp))
    if kind == "sigmoid":
        margin = (ours.chosen_reward - ours.rejected_reward).mean()
        assert float(margin) == pytest.approx(trainer._metrics["train"]["rewards/margins"][0], abs=1e-6)


# --- distillation and shaping ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "beta"), [("forward", 0.0), ("reverse", 1.0), ("jsd", 0.5), ("jsd", 0.1)])
def test_divergences(kind: Kind, beta: float) -> None:
    trainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    logits = torch.randn(2, 5, 13).double().requires_grad_()
    teacher = torch.randn(2, 5, 13).double()
    theirs = trainer.generalized_jsd_loss(logits, teacher, beta=beta, reduction="sum")
    ours = divergence(torch.log_softmax(logits, -1), torch.log_softmax(teacher, -1), kind, mix=beta).sum()
    close(f"{kind} {beta}", with_slope(ours, logits), with_slope(theirs, logits))


def test_soft_overlong_penalty() -> None:
    rewards = pytest.importorskip("trl.rewards")
    lengths = np.arange(0, 130, 7)
    theirs = rewards.get_soft_overlong_punishment(100, 20)([[1] * n for n in lengths])
    np.testing.assert_allclose(soft_overlong_penalty(lengths, limit=100, buffer=20), theirs, atol=1e-15)
