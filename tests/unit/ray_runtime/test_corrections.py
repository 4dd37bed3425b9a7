"""Corrections of a stale policy inside the loss of a train stage."""

from __future__ import annotations

import math

import pytest
import torch

from rlflow.backends.ray_runtime.terms import Inputs, evaluate_terms, metric_names
from rlflow.ir.ops import AdamW, Correction, Gspo, Kl, LossTerm, PpoClip, Reinforce, Train, TruncatedIs

CLIP = PpoClip(weight=1.0, clip_low=0.2, clip_high=0.2)


def op(*loss: LossTerm, correction: Correction | None = None) -> Train:
    return Train(model="m", loss=loss, optimizer=AdamW(lr=1e-3), minibatch=2, correction=correction)


def inputs(predicted: torch.Tensor, lengths: list[int], **columns: list[float]) -> Inputs:
    tokens, rows = len(predicted), len(lengths)
    weights = torch.full((tokens,), 1.0 / tokens)
    found = {name: torch.tensor(values) for name, values in columns.items()}
    return Inputs(predicted, torch.zeros(tokens), torch.tensor(lengths), weights, None, found, tokens, rows)


def test_the_weight_is_old_over_behaviour_and_carries_no_gradient() -> None:
    """slime pull request 179: with the new log-probability in the weight the loss was -1.97847."""
    new = torch.tensor([-0.5], requires_grad=True)
    m = inputs(new, [1], advantages=[1.0], old=[-0.9], behaviour=[-1.0])
    loss, metrics = evaluate_terms(op(CLIP, correction=TruncatedIs(cap=2.0)), m)
    assert loss.item() == pytest.approx(-1.32620, abs=1e-5)
    assert metrics["correction/token_weight_mean"].item() == pytest.approx(1.10517, abs=1e-5)
    loss.backward()
    assert new.grad is not None
    assert new.grad.item() == 0.0  # the ratio is beyond the clip; through the weight there would be a gradient


def test_without_old_the_current_policy_is_the_one_before_the_update() -> None:
    new = torch.tensor([-0.5, -2.0], requires_grad=True)
    m = inputs(new, [2], advantages=[1.0, -1.0], behaviour=[-1.0, -1.0])
    loss, metrics = evaluate_terms(op(CLIP, correction=TruncatedIs(cap=1.5)), m)
    weights = [1.5, math.exp(-1.0)]  # exp(0.5) = 1.65 is truncated
    assert loss.item() == pytest.approx((-weights[0] + weights[1]) / 2)
    assert metrics["correction/token_outside_share"].item() == 0.5
    loss.backward()
    assert torch.allclose(new.grad, torch.tensor([-weights[0], weights[1]]) / 2)


def test_only_terms_that_assume_fresh_samples_are_weighted() -> None:
    new = torch.tensor([-0.5])
    kl = Kl(weight=1.0, estimator="k1")
    m = inputs(new, [1], advantages=[1.0], behaviour=[-1.0], reference=[-0.7])
    plain, _ = evaluate_terms(op(kl), m)
    both, _ = evaluate_terms(op(Reinforce(weight=1.0), kl, correction=TruncatedIs(cap=None)), m)
    policy, _ = evaluate_terms(op(Reinforce(weight=1.0)), m)
    assert both.item() == pytest.approx(policy.item() * math.exp(0.5) + plain.item())


@pytest.mark.parametrize(("outside", "factor"), [("truncate", 1.2), ("mask", 0.0)])
def test_a_response_has_one_weight(outside: str, factor: float) -> None:
    new = torch.tensor([-0.4, -0.4, -1.0])
    columns = {"advantages": [1.0, 1.0, 2.0], "behaviour": [-0.7, -0.7, -1.0]}
    m = inputs(new, [2, 1], **columns)
    by = TruncatedIs(cap=1.2, level="sequence_mean", outside=outside)  # type: ignore[arg-type]
    loss, metrics = evaluate_terms(op(Gspo(weight=1.0, clip_low=0.2, clip_high=0.2), correction=by), m)
    assert loss.item() == pytest.approx(-(factor * 1.0 + 1.0 * 2.0) / 2)  # geometric mean ratio exp(0.3) = 1.35 and 1
    assert metrics["correction/sequence_mean_outside_share"].item() == 0.5


def test_metric_names_are_those_that_the_terms_give() -> None:
    train = op(CLIP, correction=TruncatedIs())
    m = inputs(torch.tensor([-0.5]), [1], advantages=[1.0], behaviour=[-1.0])
    _, found = evaluate_terms(train, m)
    assert set(found) | {"actor/loss", "actor/entropy"} == set(metric_names(train, "actor"))


def test_missing_behaviour_is_an_error() -> None:
    m = inputs(torch.tensor([-0.5]), [1], advantages=[1.0])
    with pytest.raises(ValueError, match="drawn with"):
        evaluate_terms(op(CLIP, correction=TruncatedIs()), m)
