"""The interface on the device that every machine has, and what is said where another is asked for."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from rlflow.backends.ray_runtime.devices.cpu import Cpu
from rlflow.backends.ray_runtime.devices.cuda import Cuda
from rlflow.backends.ray_runtime.devices.device import DEVICES, device_class, open_device
from rlflow.backends.ray_runtime.devices.npu import Npu
from rlflow.diagnostics.diagnostic import RunFailure


def test_the_words_of_each_kind() -> None:
    found = {kind: device_class(kind) for kind in DEVICES}
    assert {k: (d.collective_backend, d.ray_resource, d.visible_variable) for k, d in found.items()} == {
        "cpu": ("gloo", "CPU", ""),
        "cuda": ("nccl", "GPU", "CUDA_VISIBLE_DEVICES"),
        "npu": ("hccl", "NPU", "ASCEND_RT_VISIBLE_DEVICES"),
    }
    assert all(device.kind == kind for kind, device in found.items())


def test_a_cpu_is_a_device() -> None:
    device = open_device("cpu")
    assert device.torch_device == torch.device("cpu")
    before = device.memory()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    after = device.memory()
    assert after.allocated - before.allocated > 32 << 20
    assert after.peak >= after.allocated
    assert 0 < after.free < after.total
    del block
    with device.stream():
        event = device.event()
    event.wait()
    event.synchronize()
    assert event.reached()
    assert device.pinned(torch.Size([3]), torch.int32).shape == (3,)
    assert device.group_options(buffer_bytes=1 << 20) is None


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_a_device_that_is_not_there_is_an_error_not_a_cpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr({"npu": Npu, "cuda": Cuda}[kind], "count", classmethod(lambda cls: 0))
    variable = device_class(kind).visible_variable
    monkeypatch.setenv(variable, "3,1")
    with pytest.raises(RunFailure) as caught:
        open_device(kind)
    assert caught.value.code == "RLF5032"
    assert caught.value.message == f"{kind} device 0 is not there: this process sees 0"
    assert f"{variable} is `3,1`" in caught.value.notes


def test_an_index_and_a_kind_that_are_not_there() -> None:
    with pytest.raises(RunFailure, match="cpu device 1 is not there: this process sees 1"):
        open_device("cpu", 1)
    with pytest.raises(RunFailure, match="`tpu` is no kind of device"):
        open_device("tpu")


def test_without_the_package_there_are_no_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # an import then fails as if it were not installed
    assert Npu.count() == 0


def test_a_package_that_does_not_load_is_not_a_host_without_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name == "torch_npu":
                raise ImportError("libascendcl.so: cannot open shared object file")
            return None

    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ImportError, match="libascendcl"):
        Npu.count()


def test_a_cpu_has_one() -> None:
    assert Cpu.count() == 1
