"""Divergences to teachers."""

from __future__ import annotations

import math

import pytest
import torch

from rlflow.backends.ray_runtime.algorithms.distill import (
    Kind,
    divergence,
    mixed_divergence,
    reverse_kl_advantages,
    topk_divergence,
)
from rlflow.backends.ray_runtime.algorithms.policy import reinforce

KINDS: list[Kind] = ["forward", "reverse", "jsd"]


def distributions(count: int, tokens: int = 5, vocabulary: int = 11) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.log_softmax(torch.randn(tokens, vocabulary).double() * 2, -1) for _ in range(count)]


def test_by_hand() -> None:
    student, teacher = torch.log(torch.tensor([[0.5, 0.5]])), torch.log(torch.tensor([[0.9, 0.1]]))
    assert divergence(student, teacher, "forward").item() == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert divergence(student, teacher, "reverse").item() == pytest.approx(-0.5 * math.log(1.8) - 0.5 * math.log(0.2))
    middle = [0.7, 0.3]
    expected = 0.5 * sum(
        p * math.log(p / m) for row in ([0.9, 0.1], [0.5, 0.5]) for p, m in zip(row, middle, strict=True)
    )
    assert divergence(student, teacher, "jsd").item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_properties_of_the_divergences(kind: Kind) -> None:
    student, teacher = distributions(2)
    found = divergence(student, teacher, kind)
    assert (found > 0).all()
    assert divergence(student, student, kind).abs().max() < 1e-12
    order = torch.argsort(teacher, -1, descending=True)
    previous = torch.zeros(5).double()
    for k in (1, 3, 7, 11):
        ids = order[:, :k]
        coarse = topk_divergence(student, teacher.gather(-1, ids), ids, kind)
        assert (coarse >= previous - 1e-12).all()  # finer bins never lower a divergence
        assert (coarse <= found + 1e-12).all()
        previous = coarse
    torch.testing.assert_close(previous, found, rtol=1e-9, atol=1e-9)
    whole = topk_divergence(student, teacher.gather(-1, order), order, kind, tail=False)
    torch.testing.assert_close(whole, found)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: Kind) -> None:
    logits = torch.randn(3, 6).double().requires_grad_()
    teacher = torch.log_softmax(torch.randn(3, 6).double(), -1)
    ids = torch.topk(teacher, 3).indices

    def full(x: torch.Tensor) -> torch.Tensor:
        return divergence(torch.log_softmax(x, -1), teacher, kind, mix=0.3)

    def top(x: torch.Tensor) -> torch.Tensor:
        return topk_divergence(torch.log_softmax(x, -1), teacher.gather(-1, ids), ids, kind, mix=0.3)

    assert torch.autograd.gradcheck(full, logits)
    assert torch.autograd.gradcheck(top, logits)


def test_jsd_tends_to_the_kls() -> None:
    student, teacher = distributions(2)
    near = 1e-6
    torch.testing.assert_close(
        divergence(student, teacher, "jsd", mix=near) / near, divergence(student, teacher, "forward"), rtol=1e-3, atol=0
    )
    torch.testing.assert_close(
        divergence(student, teacher, "jsd", mix=1 - near) / near,
        divergence(student, teacher, "reverse"),
        rtol=1e-3,
        atol=0,
    )
    with pytest.raises(ValueError, match="mix"):
        divergence(student, teacher, "jsd", mix=1.0)


def test_an_excluded_token_makes_no_nan() -> None:
    teacher = torch.log_softmax(torch.tensor([[0.0, 1.0, float("-inf")]]), -1)
    student = torch.log_softmax(torch.zeros(1, 3), -1).requires_grad_()
    loss = divergence(student, teacher, "forward").sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    assert torch.isinf(divergence(student, teacher, "reverse")).all()
    assert torch.isfinite(divergence(student, teacher, "jsd")).all()


def test_the_sampled_form_has_the_gradient_of_the_reverse_kl() -> None:
    logits = torch.randn(1, 7).double().requires_grad_()
    first, second = (torch.log_softmax(torch.randn(1, 7).double(), -1) for _ in range(2))
    log_probs = torch.log_softmax(logits, -1)
    exact = mixed_divergence(log_probs, [first, second], [0.7, 0.2], "reverse").sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    # every token is sampled with its probability: the expectation, exactly
    advantages = reverse_kl_advantages(log_probs[0], [first[0], second[0]], [0.7, 0.2])
    assert not advantages.requires_grad
    expected = (log_probs[0].detach().exp() * reinforce(log_probs[0], advantages)).sum()
    (got,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(got, wanted)


def test_a_teacher_per_row() -> None:
    nan = float("nan")
    logp, left, right = torch.tensor([-1.0, -1.0]), torch.tensor([-0.5, nan]), torch.tensor([nan, -3.0])
    weights = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0])]
    assert reverse_kl_advantages(logp, [left, right], weights).tolist() == [1.0, -2.0]
    student = torch.log_softmax(torch.randn(2, 4), -1).requires_grad_()
    teacher = torch.log_softmax(torch.randn(2, 4), -1)
    broken = teacher.clone()
    broken[1] = nan
    got = mixed_divergence(student, [broken], [torch.tensor([1.0, 0.0])], "reverse")
    torch.testing.assert_close(got[0], divergence(student, teacher, "reverse")[0])
    got.sum().backward()
    assert got[1].item() == 0
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    with pytest.raises(ValueError, match="one weight per teacher"):
        reverse_kl_advantages(logp, [left], [1.0, 2.0])
