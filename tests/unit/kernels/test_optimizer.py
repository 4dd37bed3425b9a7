"""The optimizer made of the kernel is torch's, number for number and state for state."""

from __future__ import annotations

import copy

import pytest
import torch

from rlflow.backends.ray_runtime.kernels.adamw import FusedAdamW, adamw, make_adamw

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.05}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def test_it_is_adamw_and_goes_on_from_its_state() -> None:
    ours, theirs = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
    theirs.load_state_dict(ours.state_dict())
    mine, other = FusedAdamW(ours.parameters(), **SETTINGS), torch.optim.AdamW(theirs.parameters(), **SETTINGS)
    train(ours, mine, range(5))
    train(theirs, other, range(5))
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=1e-7)
    resumed = FusedAdamW(theirs.parameters(), **SETTINGS)
    resumed.load_state_dict(copy.deepcopy(other.state_dict()))
    train(ours, mine, range(5, 8))
    train(theirs, resumed, range(5, 8))
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=1e-7)
    assert mine.state_dict()["state"][0].keys() == other.state_dict()["state"][0].keys()


def test_a_parameter_without_a_gradient_stays() -> None:
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdamW([used, unused], lr=0.1)
    used.sum().backward()
    optimizer.step()
    assert unused.tolist() == [1.0, 1.0]
    assert used.tolist() != [1.0, 1.0]


def test_the_kernel_is_used_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
    theirs.load_state_dict(ours.state_dict())
    plain = make_adamw(list(theirs.parameters()), **SETTINGS)
    assert type(plain) is torch.optim.AdamW
    updated = []

    def noted(parameter: torch.Tensor, *rest: torch.Tensor, **settings: object) -> None:
        updated.append(tuple(parameter.shape))
        adamw.implementations["torch"](parameter, *rest, **settings)

    monkeypatch.setitem(adamw.implementations, "noted", noted)
    monkeypatch.setenv("RLFLOW_KERNELS", "adamw=noted")
    chosen = make_adamw(list(ours.parameters()), **SETTINGS)
    train(ours, chosen, range(3))
    train(theirs, plain, range(3))
    assert updated == 3 * [(3, 6), (3,)]
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=1e-7)
    # A run goes on with the other one: in both directions, moments and count.
    there, back = make_adamw(list(ours.parameters()), **SETTINGS), torch.optim.AdamW(theirs.parameters(), fused=True)
    there.load_state_dict(copy.deepcopy(plain.state_dict()))
    back.load_state_dict(copy.deepcopy(chosen.state_dict()))
    train(ours, there, range(3, 5))
    train(theirs, back, range(3, 5))
    assert len(updated) == 10
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=1e-7)
