"""Which weights of a rank on an NPU have the blocked format, by torch_npu's own word."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.npu.frozen_model import frozen_flow, loaded

LINEAR = 2 * 7
"""Of both layers: four of attention, three of the MLP."""


def formats(state: Any, name: str, torch_npu: Any) -> Counter[str]:
    weights = state.models[name].loaded.model.parameters()
    return Counter(str(torch_npu.get_npu_format(weight)).rpartition(".")[2] for weight in weights)


def test_a_frozen_model_has_it_and_a_trained_one_has_not(
    tmp_path: Path, calls: Any, real_torch_npu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = frozen_flow(tmp_path)
    with calls(fake=False):
        state = loaded(file)
    assert formats(state, "reference", real_torch_npu)["FRACTAL_NZ"] == LINEAR
    assert set(formats(state, "actor", real_torch_npu)) == {"ND"}
    monkeypatch.setenv("RLFLOW_KERNELS", "format_cast=torch")
    assert set(formats(loaded(file), "reference", real_torch_npu)) == {"ND"}
