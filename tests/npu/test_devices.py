"""The device layer through the real torch.npu, whose memory, copies, streams and events the stand-ins carry out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlflow.backends.ray_runtime.devices.device import Device, open_device
from rlflow.backends.ray_runtime.devices.swap import Swap
from rlflow.diagnostics.diagnostic import RunFailure

MIB = 1 << 20


@pytest.fixture
def device() -> Device:
    return open_device("npu")


def values(device: Device, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    host = torch.randn(MIB // 4 * number, generator=torch.Generator().manual_seed(number))
    return host, host.to(device.torch_device)


def test_what_it_says_of_itself(device: Device) -> None:
    assert device.name() == "Ascend910B1"
    assert device.count() == 2
    assert device.memory().total == 64 << 30
    assert torch.npu.current_device() == 0
    with pytest.raises(RunFailure, match="npu device 2 is not there: this process sees 2"):
        open_device("npu", 2)


def test_memory_goes_up_and_down(device: Device) -> None:
    device.reset_peak()
    before = device.memory()
    _, tensor = values(device, 8)
    held = device.memory()
    assert 8 * MIB <= held.allocated - before.allocated <= 8 * MIB + 512
    del tensor
    after = device.memory()
    assert after.allocated == before.allocated
    assert after.peak >= held.allocated
    assert after.reserved >= held.allocated
    device.release_cache()
    assert device.memory().reserved < after.reserved


@pytest.mark.parametrize("aside", [False, True])
def test_swap_is_exact_and_frees_what_it_says(device: Device, aside: bool) -> None:
    pairs = [values(device, number) for number in (1, 2, 3)]
    swap = Swap(device, [tensor for _, tensor in pairs])
    before = device.memory().allocated
    for _ in range(2):
        swap.offload(aside).synchronize()
        device.synchronize()
        assert 0 <= before - device.memory().allocated - swap.num_bytes <= 3 * 512
        swap.onload(aside).wait()
        assert device.memory().allocated == before
        for host, tensor in pairs:
            assert torch.equal(tensor.cpu(), host)


def test_events_mark_a_stream(device: Device) -> None:
    with device.stream():
        event = device.event()
    event.wait()
    event.synchronize()
    assert event.reached()


def test_pinned_memory_is_pinned(device: Device) -> None:
    assert device.pinned(torch.Size([16]), torch.float32).is_pinned()


def test_buffers_of_a_communicator_are_set_in_mebibytes(device: Device) -> None:
    options: Any = device.group_options(buffer_bytes=64 * MIB)
    assert options.hccl_config == {"hccl_buffer_size": 64}
    assert device.group_options() is None
    assert torch.distributed.is_backend_available(device.collective_backend)
