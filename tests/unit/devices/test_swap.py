"""Tensors leave and come back under every name that they have."""

from __future__ import annotations

import pytest
import torch

from rlflow.backends.ray_runtime.devices.device import open_device
from rlflow.backends.ray_runtime.devices.swap import Swap, own_memory


@pytest.mark.parametrize("aside", [False, True])
def test_a_model_and_its_optimizer_go_and_come_back(aside: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    moments = [s for state in optimizer.state.values() for s in state.values() if s.dim()]
    tensors = [*model.parameters(), *moments]
    before = [tensor.detach().clone() for tensor in tensors]
    swap = Swap(open_device("cpu"), tensors)
    assert swap.num_bytes == 3 * (8 * 4 + 4) * 4
    for _ in range(2):
        swap.offload(aside).synchronize()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        swap.onload(aside).wait()
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor, old)
    model(torch.randn(3, 8)).sum().backward()


def test_views_of_one_storage_move_once() -> None:
    base = torch.arange(12.0)
    parts = [base[:4], base[4:].view(2, 4), base]
    swap = Swap(open_device("cpu"), parts)
    assert swap.num_bytes == 48
    swap.offload()
    swap.onload()
    assert parts[1].tolist() == [[4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]


def test_dropped_values_are_gone_and_the_memory_comes_back() -> None:
    tensor = torch.ones(4)
    swap = Swap(open_device("cpu"), [tensor])
    swap.drop()
    swap.release_host()
    swap.onload()
    tensor.fill_(2.0)
    assert tensor.tolist() == [2.0] * 4


def test_states_are_kept_apart() -> None:
    swap = Swap(open_device("cpu"), [torch.ones(4)])
    with pytest.raises(ValueError, match="on the device cannot be onloaded"):
        swap.onload()
    swap.offload()
    with pytest.raises(ValueError, match="not on the device cannot be offloaded"):
        swap.offload()
    with pytest.raises(ValueError, match="only copy"):
        swap.release_host()
    swap.onload()
    swap.release_host()


def test_memory_that_numpy_has_looked_at_is_replaced_by_own_memory() -> None:
    whole = torch.arange(6.0)
    whole.numpy()
    half = whole[3:]
    assert not whole.untyped_storage().resizable()
    own_memory([whole, half])
    assert whole.untyped_storage().data_ptr() == half.untyped_storage().data_ptr()
    swap = Swap(open_device("cpu"), [whole, half])
    swap.offload()
    swap.onload()
    assert half.tolist() == [3.0, 4.0, 5.0]


def test_a_dropped_copy_that_stays_valid_comes_back() -> None:
    tensor = torch.ones(4)
    swap = Swap(open_device("cpu"), [tensor])
    with pytest.raises(ValueError, match="no copy"):
        swap.drop(keep=True)
    swap.offload()
    assert swap.host_bytes == 16
    swap.onload()
    swap.drop(keep=True)
    assert tensor.untyped_storage().nbytes() == 0
    swap.onload()
    assert tensor.tolist() == [1.0] * 4
