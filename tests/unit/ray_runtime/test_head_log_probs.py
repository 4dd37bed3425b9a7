"""Log-probabilities and entropies in one buffer are those of torch's own functions, forward and backward."""

from __future__ import annotations

import pytest
import torch

from rlflow.backends.ray_runtime import head_log_probs
from rlflow.backends.ray_runtime.algorithms.losses import entropy
from rlflow.backends.ray_runtime.head_log_probs import log_probs_of


def plain(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = torch.log_softmax(logits / temperature, -1)
    return log_probs.gather(1, targets[:, None])[:, 0], entropy(log_probs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("part", [1, 100, 1 << 20])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.6, -0.3)])
def test_values_and_gradients(
    temperature: float, part: int, weights: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_log_probs, "_PART", part)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 6, generator=generator)
    weight = 3 * torch.randn(31, 6, generator=generator)
    targets = torch.randint(0, 31, (9,), generator=generator)
    of = torch.randn(2, 9, generator=generator) * torch.tensor(weights)[:, None]
    found = []
    for way in ("plain", "one buffer"):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = torch.nn.functional.linear(h, w)
        if way == "plain":
            logp, spread = plain(logits, targets, temperature)
        else:
            logp, spread = log_probs_of(logits, targets, temperature, entropies=True, spread=True)
        found.append((logp.detach(), spread.detach(), *torch.autograd.grad([logp, spread], [h, w], list(of))))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def test_tokens_of_no_probability_have_finite_gradients() -> None:
    logits = torch.tensor([[0.0, 300.0, -300.0, 299.0]], requires_grad=True)
    logp, spread = log_probs_of(logits * 1.0, torch.tensor([2]), 1.0, entropies=True, spread=True)
    (gradient,) = torch.autograd.grad((logp + spread).sum(), logits)
    assert float(logp.detach()) == pytest.approx(-600.3133, abs=1e-3)
    two = torch.distributions.Categorical(logits=torch.tensor([300.0, 299.0])).entropy()
    torch.testing.assert_close(spread.detach(), two[None])
    assert torch.isfinite(gradient).all()
    assert float(gradient[0, 2]) == 1.0


def test_the_entropy_of_a_metric_carries_no_gradient_and_a_buffer_serves_once() -> None:
    logits = torch.randn(4, 7, requires_grad=True)
    logp, spread = log_probs_of(logits * 1.0, torch.arange(4), 1.0, entropies=True, spread=False)
    assert not spread.requires_grad
    logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up"):
        logp.sum().backward()


def test_without_entropies_the_log_probabilities_are_the_same_bits() -> None:
    logits = torch.randn(5, 1000)
    targets = torch.randint(0, 1000, (5,))
    with_them = log_probs_of(logits.clone(), targets, 0.9, entropies=True, spread=False)
    without = log_probs_of(logits.clone(), targets, 0.9, entropies=False, spread=False)
    assert torch.equal(with_them[0], without[0])
    assert not len(without[1])
