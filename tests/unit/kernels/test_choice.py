"""Which implementation runs: the device's, the user's, the program's."""

from __future__ import annotations

import sys

import pytest
import torch

from rlflow.backends.ray_runtime.kernels.kernel import VARIABLE, Checker, Kernel, using
from rlflow.backends.ray_runtime.kernels.table import grouped_matmul, infer_attention, swiglu
from rlflow.diagnostics.diagnostic import RunFailure

X = torch.ones(2, 4)


def test_the_device_decides() -> None:
    assert swiglu.choice("cpu") == swiglu.choice("cuda") == "torch"
    assert swiglu.choice("npu") == "npu"


def test_nothing_here_loads_torch_npu() -> None:
    swiglu(X)
    grouped_matmul(X, torch.ones(2, 4, 3), torch.tensor([1, 1]))
    assert "torch_npu" not in sys.modules


def test_the_variable_overrides_one_kernel_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "swiglu=torch, all=npu")
    assert swiglu.choice("npu") == "torch"
    assert grouped_matmul.choice("cpu") == "npu"
    monkeypatch.setenv(VARIABLE, "infer_attention=npu_incremental")
    assert infer_attention.choice("npu") == "npu_incremental"
    monkeypatch.delenv(VARIABLE)
    assert infer_attention.choice("npu") == "npu"


def test_a_slip_in_the_variable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, words in (
        ("swiglu=triton", "kernel `swiglu` has no implementation `triton`"),
        ("swigloo=torch", "there is no kernel `swigloo`"),
        ("swiglu", f"`swiglu` in {VARIABLE} is not NAME=IMPLEMENTATION"),
    ):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(RunFailure) as caught:
            swiglu(X)
        assert (caught.value.code, caught.value.message) == ("RLF5031", words)


def test_a_program_adds_and_forces_its_own() -> None:
    calls: list[str] = []

    def check(checker: Checker, x: torch.Tensor) -> None:
        calls.append("check")

    def own(x: torch.Tensor) -> torch.Tensor:
        calls.append("own")
        return x

    kernel = Kernel("only_here", reference=lambda x: x + 1, npu=lambda x: x + 2, check=check)
    kernel.register("own", own)
    assert kernel(X)[0, 0] == 2
    with using("own", "only_here"):
        assert kernel(X)[0, 0] == 1
        with using("npu", "only_here"):
            assert kernel(X)[0, 0] == 3
    assert kernel(X)[0, 0] == 2
    assert calls == ["check", "check", "own", "check"]
    with pytest.raises(RunFailure), using("torch", "nowhere"):
        pass


def test_what_has_passed_is_not_looked_at_again() -> None:
    looked: list[torch.Size] = []

    def check(checker: Checker, x: torch.Tensor) -> None:
        looked.append(x.shape)
        checker.that(x.shape[0] < 4, "too many rows")

    kernel = Kernel("only_here", reference=lambda x: x, npu=lambda x: x, check=check)
    for rows in (2, 2, 3, 2):
        kernel(torch.ones(rows))
    kernel(torch.ones(2, requires_grad=True))
    kernel.check("npu", torch.ones(2))
    for _ in range(2):
        with pytest.raises(RunFailure):
            kernel(torch.ones(4))
    assert looked == [(2,), (3,), (2,), (2,), (4,), (4,)]


@pytest.fixture(autouse=True)
def _forget_test_kernels() -> object:
    from rlflow.backends.ray_runtime.kernels.kernel import ALL

    yield
    ALL.pop("only_here", None)
