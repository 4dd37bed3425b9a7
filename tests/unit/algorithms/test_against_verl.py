"""The same random tensors through verl's core_algos. Runs where verl is installed (it is no dependency); verl 0.9.1.

Tests named `differs` pin places where verl does something else on purpose of ours; the reason stands in each.
`pytest -rP` prints the largest differences.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.backends.ray_runtime.algorithms.advantages import group_normalize
from rlflow.backends.ray_runtime.algorithms.aggregate import Aggregate, aggregate, token_weights
from rlflow.backends.ray_runtime.algorithms.correction import Level, importance_weights
from rlflow.backends.ray_runtime.algorithms.distill import topk_divergence
from rlflow.backends.ray_runtime.algorithms.gae import Clock, gae
from rlflow.backends.ray_runtime.algorithms.group import opo, remax, rloo
from rlflow.backends.ray_runtime.algorithms.kl import Estimator, kl_estimate
from rlflow.backends.ray_runtime.algorithms.losses import ppo_clip
from rlflow.backends.ray_runtime.algorithms.moments import whiten
from rlflow.backends.ray_runtime.algorithms.policy import cispo, decoupled_ppo, ppo_dual_clip, reinforce
from rlflow.backends.ray_runtime.algorithms.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from rlflow.backends.ray_runtime.algorithms.rows import row_counts, row_ids
from rlflow.backends.ray_runtime.algorithms.sequence import gspo_token
from rlflow.backends.ray_runtime.algorithms.shaping import score_at_end, with_kl_penalty
from rlflow.backends.ray_runtime.algorithms.statistics import token_share
from rlflow.backends.ray_runtime.algorithms.token_sum import token_sum_weights
from rlflow.backends.ray_runtime.algorithms.value import value_clip

core = pytest.importorskip("verl.trainer.ppo.core_algos")

ROWS, WIDTH = 12, 9
GROUPS = np.repeat(np.arange(3), 4)
EXACT = 1e-12
FLOAT32 = 2e-6


class Sample:
    """Random rows in both layouts: `x` packed, `padded(x)` as verl wants it. Float64; every row has a counted token."""

    def __init__(self, holes: bool = True) -> None:
        generator = torch.Generator().manual_seed(5)
        self.lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
        self.inside = torch.arange(WIDTH)[None, :] < self.lengths[:, None]
        keep = torch.rand((ROWS, WIDTH), generator=generator) < (0.7 if holes else 2.0)
        keep[:, 0] = True
        self.matrix_mask = (self.inside & keep).double()
        self.mask = self.packed(self.matrix_mask)
        self.tokens = float(self.mask.sum())
        self.old = -torch.rand(len(self.mask), generator=generator).double() - 0.05
        self.logp = self.old + 0.5 * torch.randn(len(self.mask), generator=generator)
        self.scores = torch.randn(ROWS, generator=generator).double()
        self.values = torch.randn(len(self.mask), generator=generator).double()
        self.advantages = torch.randn(len(self.mask), generator=generator).double()

    def packed(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix[self.inside]

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        out = torch.zeros((ROWS, WIDTH), dtype=values.dtype)
        out[self.inside] = values
        return out

    def per_token(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values)[row_ids(self.lengths)] * self.mask


def close(name: str, ours: torch.Tensor, theirs: torch.Tensor, limit: float) -> None:
    found = float((ours - theirs).abs().max())
    print(f"DIFF verl {name}: {found:.1e} of {float(theirs.abs().max()):.3g}")
    assert found <= limit * max(1.0, float(theirs.abs().max()))


def config(**settings: Any) -> Any:
    actor = pytest.importorskip("verl.workers.config").ActorConfig
    base = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1, "global_batch_info": {}}
    return actor(**{**base, **settings})


def with_slope(loss: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(loss, at, retain_graph=True)
    return torch.cat([loss.detach().reshape(1), slope.reshape(-1)])


# --- advantages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1.0, 0.97])
@pytest.mark.parametrize("lam", [1.0, 0.95])
@pytest.mark.parametrize("holes", [False, True])
def test_gae(gamma: float, lam: float, holes: bool) -> None:
    s = Sample(holes)
    rewards = score_at_end(s.scores, s.lengths, s.mask)
    theirs, returns = core.compute_gae_advantage_return(
        s.padded(rewards), s.padded(s.values), s.matrix_mask, gamma=gamma, lam=lam
    )
    ours = gae(rewards, s.values, s.lengths, gamma=gamma, lam=lam, mask=s.mask, clock="counted")
    counted = s.mask > 0
    close("gae returns", ours.returns[counted], s.packed(returns)[counted], EXACT)
    close("gae whitened", whiten(ours.advantages, s.mask)[counted], s.packed(theirs)[counted], 1e-7)


def test_gae_differs_in_the_clock() -> None:
    # I5 counts every token as a step of time, verl only those the policy chose.
    s = Sample()
    rewards = score_at_end(s.scores, s.lengths, s.mask)
    clock: Clock = "all"
    ours = gae(rewards, s.values, s.lengths, gamma=0.9, lam=0.9, mask=s.mask, clock=clock).returns
    _, theirs = core.compute_gae_advantage_return(s.padded(rewards), s.padded(s.values), s.matrix_mask, 0.9, 0.9)
    assert (ours - s.packed(theirs))[s.mask > 0].abs().max() > 1e-2


def test_a_reward_on_a_masked_token_is_lost() -> None:
    # verl drops it silently, in GAE and REINFORCE++ alike; so do we, and `score_at_end` never puts one there.
    reward, mask = torch.tensor([[0.0, 1.0]]).double(), torch.tensor([[1.0, 0.0]]).double()
    _, returns = core.compute_reinforce_plus_plus_outcome_advantage(
        torch.cat([reward, reward]), torch.cat([mask, mask]), config=SimpleNamespace(gamma=1.0)
    )
    assert returns.abs().max() == 0
    assert score_at_end(torch.tensor([1.0]), torch.tensor([2]), mask[0]).tolist() == [1, 0]


@pytest.mark.parametrize("std", [True, False])
def test_grpo(std: bool) -> None:
    s = Sample()
    theirs, _ = core.compute_grpo_outcome_advantage(
        s.padded(score_at_end(s.scores, s.lengths, s.mask)), s.matrix_mask, GROUPS, norm_adv_by_std_in_grpo=std
    )
    ours = s.per_token(group_normalize(s.scores.numpy(), GROUPS, std=std, epsilon=1e-6))
    close(f"grpo std={std}", ours, s.packed(theirs), EXACT)


def test_per_sample_estimators() -> None:
    s = Sample()
    rewards = s.padded(score_at_end(s.scores, s.lengths, s.mask))
    scores = s.scores.numpy()
    theirs, _ = core.compute_rloo_outcome_advantage(rewards.clone(), s.matrix_mask, GROUPS)
    close("rloo", s.per_token(rloo(scores, GROUPS).values), s.packed(theirs), EXACT)
    theirs, _ = core.compute_opo_outcome_advantage(rewards.clone(), s.matrix_mask, GROUPS)
    tokens = row_counts(s.lengths, s.mask).numpy()
    close("opo", s.per_token(opo(scores, GROUPS, tokens).values), s.packed(theirs), FLOAT32)
    greedy = torch.randn(ROWS).double()
    theirs, _ = core.compute_remax_outcome_advantage(rewards.clone(), greedy, s.matrix_mask)
    # verl's return stops at the last counted token; in the holes before it the return is there but masked in the loss
    counted = s.mask > 0
    ours = s.per_token(remax(scores, greedy.numpy()).values)
    close("remax", ours[counted], s.packed(theirs)[counted], EXACT)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(gamma: float) -> None:
    s = Sample()
    rewards = with_kl_penalty(score_at_end(s.scores, s.lengths, s.mask), s.logp - s.old, coefficient=0.1, mask=s.mask)
    theirs, _ = core.compute_reinforce_plus_plus_outcome_advantage(
        s.padded(rewards), s.matrix_mask, config=SimpleNamespace(gamma=gamma)
    )
    ours = reinforce_pp(rewards, s.lengths, gamma=gamma, mask=s.mask, clock="counted")
    close("reinforce++", ours, s.packed(theirs), 1e-7)


def test_reinforce_plus_plus_baseline() -> None:
    s = Sample()
    theirs, _ = core.compute_reinforce_plus_plus_baseline_outcome_advantage(
        s.padded(score_at_end(s.scores, s.lengths, s.mask)), s.matrix_mask, GROUPS
    )
    ours = reinforce_pp_baseline(s.scores.numpy(), GROUPS, s.lengths, mask=s.mask)
    close("reinforce++ baseline", ours, s.packed(theirs), FLOAT32)


def test_group_of_one_differs() -> None:
    # verl takes mean 0 and deviation 1 for a group of one: its raw reward is the advantage. Ours is 0 (H2).
    reward, mask = torch.tensor([[0.0, 3.0]]).double(), torch.ones(1, 2).double()
    theirs, _ = core.compute_grpo_outcome_advantage(reward, mask, np.array([0]))
    assert theirs.max() == pytest.approx(3, abs=1e-4)
    assert group_normalize(np.array([3.0]), np.array([0]), std=True, epsilon=1e-6)[0] == 0
    theirs, _ = core.compute_rloo_outcome_advantage(torch.tensor([[0.0, 3.0]]), mask, np.array([0]))
    assert theirs.max() == 3  # ours: ValueError


# --- losses ----------------------------------------------------------------------------------------------------------

MODES: dict[str, Aggregate] = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
}


def weights(s: Sample, mode: str) -> torch.Tensor:
    if mode == "seq-mean-token-sum-norm":
        return token_sum_weights(s.lengths, horizon=WIDTH, total_rows=ROWS, mask=s.mask)
    return token_weights(s.lengths, MODES[mode], total_tokens=s.tokens, total_rows=ROWS, mask=s.mask)


@pytest.mark.parametrize("mode", [*MODES, "seq-mean-token-sum-norm"])
def test_aggregates(mode: str) -> None:
    s = Sample()
    theirs = core.agg_loss(s.padded(s.values), s.matrix_mask, mode)
    close(f"agg_loss {mode}", aggregate(s.values, weights(s, mode)), theirs, FLOAT32)


@pytest.mark.parametrize("mode", MODES)
def test_policy_losses(mode: str) -> None:
    s = Sample()
    settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.4}
    behaviour = s.old + 0.3 * torch.randn(len(s.old)).double()
    correction = importance_weights(s.old, behaviour, s.lengths, cap=1.1, mask=s.mask).weights
    logp = s.logp.clone().requires_grad_()
    ours: dict[str, torch.Tensor] = {
        "vanilla": ppo_dual_clip(logp, s.old, s.advantages, 0.2, 0.28, 1.4).loss,
        "gspo": gspo_token(logp, s.old, s.advantages, s.lengths, 0.2, 0.28, mask=s.mask).loss,
        "cispo": cispo(logp, s.old, s.advantages, 0.2, 0.28).loss,
    }
    for name, loss in ours.items():
        for corrected in (False, True):
            theirs, _ = core.get_policy_loss_fn(name)(
                s.padded(s.old),
                s.padded(logp),
                s.padded(s.advantages),
                s.matrix_mask,
                loss_agg_mode=mode,
                config=config(**settings),
                rollout_is_weights=s.padded(correction) if corrected else None,
            )
            mine = aggregate(loss * correction if corrected else loss, weights(s, mode))
            name_in_full = f"{name} {mode}" + (" corrected" if corrected else "")
            close(name_in_full, with_slope(mine, logp), with_slope(theirs, logp), FLOAT32)


def test_metrics_of_the_clip() -> None:
    s = Sample()
    _, metrics = core.compute_policy_loss_vanilla(
        s.padded(s.old),
        s.padded(s.logp),
        s.padded(s.advantages),
        s.matrix_mask,
        config=config(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.4),
    )
    got = ppo_dual_clip(s.logp, s.old, s.advantages, 0.2, 0.28, 1.4)
    for name, flags in {"clipfrac": got.clipped, "clipfrac_lower": got.floored}.items():
        mine = token_share(flags, total_tokens=s.tokens, mask=s.mask)
        assert mine == pytest.approx(metrics[f"actor/pg_{name}"], abs=1e-7)
        assert mine > 0
    assert token_share(got.kl, total_tokens=s.tokens, mask=s.mask) == pytest.approx(metrics["actor/ppo_kl"], abs=1e-7)


def test_clip_fraction_of_gspo_differs() -> None:
    # verl's mean runs over tokens, so long responses weigh more; ours is per response, named so (G6).
    s = Sample()
    _, metrics = core.compute_policy_loss_gspo(
        s.padded(s.old), s.padded(s.logp), s.padded(s.per_token(s.scores)), s.matrix_mask, config=config()
    )
    got = gspo_token(s.logp, s.old, s.per_token(s.scores), s.lengths, 0.2, 0.2, mask=s.mask)
    assert token_share(got.clipped[row_ids(s.lengths)], total_tokens=s.tokens, mask=s.mask) == pytest.approx(
        metrics["actor/pg_clipfrac"], abs=1e-6
    )


def test_plain_ppo_is_verl_with_a_bound_out_of_reach_and_decoupled_ppo_is_its_correction() -> None:
    s = Sample()
    ones = torch.full_like(s.old, 1.5)
    plain = ppo_clip(s.logp, s.old, s.advantages, 0.2, 0.2).loss
    theirs, _ = core.compute_policy_loss_vanilla(
        s.padded(s.old),
        s.padded(s.logp),
        s.padded(s.advantages),
        s.matrix_mask,
        config=config(clip_ratio_c=1e9),
        rollout_is_weights=s.padded(ones),
    )
    ours = decoupled_ppo(s.logp, s.old, s.advantages, 0.2, 0.2, ones).loss
    torch.testing.assert_close(ours, 1.5 * plain)
    close("decoupled", aggregate(ours, weights(s, "token-mean")), theirs, FLOAT32)


def test_reinforce() -> None:
    s = Sample()
    logp = s.logp.clone().requires_grad_()
    theirs, _ = core.compute_policy_loss_reinforce(
        s.padded(s.old), s.padded(logp), s.padded(s.advantages), s.matrix_mask, "token-mean", config()
    )
    ours = aggregate(reinforce(logp, s.advantages), weights(s, "token-mean"))
    close("reinforce", with_slope(ours, logp), with_slope(theirs, logp), FLOAT32)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights(level: Level) -> None:
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    s = Sample()
    counted = s.mask > 0
    for threshold, cap, floor in ((1.2, 1.2, None), ("0.8_1.2", 1.2, 0.8)):
        theirs, metrics = helper.compute_rollout_correction_weights(
            s.padded(s.logp - s.old), s.matrix_mask, rollout_is=level, rollout_is_threshold=threshold
        )
        ours = importance_weights(
            s.logp,
            s.old,
            s.lengths,
            level=level,
            cap=cap,
            floor=floor,
            outside="truncate" if floor is None else "mask",
            mask=s.mask,
        )
        close(f"importance {level} {threshold}", ours.weights[counted], s.packed(theirs)[counted], EXACT)
        assert metrics


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl(estimator: Estimator) -> None:
    s = Sample()
    close(estimator, kl_estimate(s.logp, s.old, estimator), core.kl_penalty(s.logp, s.old, estimator), EXACT)


def test_kl_of_a_far_token_differs() -> None:
    # verl bounds k3 to 10 and the log-ratio to 20, so the gradient of such a token vanishes; ours is the estimator.
    logp, reference = torch.tensor([-5.0]).double(), torch.tensor([-1.0]).double()
    assert core.kl_penalty(logp, reference, "k3").item() == 10
    assert kl_estimate(logp, reference, "k3").item() == pytest.approx(np.exp(4) - 5)


def test_value_loss() -> None:
    s = Sample()
    values = s.logp.clone().requires_grad_()
    theirs, share = core.compute_value_loss(
        s.padded(values), s.padded(s.advantages), s.padded(s.old), s.matrix_mask, 0.2, "token-mean"
    )
    ours = value_clip(values, s.old, s.advantages, 0.2)
    mine = aggregate(ours.loss, weights(s, "token-mean"))
    close("value", with_slope(mine, values), with_slope(theirs, values), FLOAT32)
    assert token_share(ours.clipped, total_tokens=s.tokens, mask=s.mask) == pytest.approx(float(share), abs=1e-7)


def test_topk_divergence_without_the_tail() -> None:
    losses = pytest.importorskip("verl.trainer.distillation.fsdp.losses")
    student, teacher = (torch.log_softmax(torch.randn(6, 20), -1) for _ in range(2))
    top, ids = torch.topk(teacher, 5)
    ours = topk_divergence(student, top, ids, "forward", tail=False)
    close("top-k forward KL", ours, losses.kl_divergence(student.gather(-1, ids), top), FLOAT32)
