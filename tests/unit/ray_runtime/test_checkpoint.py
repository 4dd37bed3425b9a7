from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from rlflow.backends.ray_runtime import checkpoint
from rlflow.backends.ray_runtime.checkpoint import load_checkpoint, save_checkpoint, weights_digest
from rlflow.backends.ray_runtime.checkpoint_folder import LATEST, latest_step, older_hint
from rlflow.backends.ray_runtime.execute import Interpreter
from rlflow.backends.ray_runtime.measure import StepMetrics, reduce_parts
from rlflow.backends.ray_runtime.saving import parts
from rlflow.backends.ray_runtime.state import RankState
from rlflow.diagnostics import RunFailure

NewState = Callable[..., RankState]


def run(state: RankState, first: int, last: int) -> list[float]:
    """Losses of the steps."""
    losses = []
    interpreter = Interpreter(state, lambda step: None)
    for step in range(first, last + 1):
        metrics = StepMetrics(state.plan, "main", 0)
        interpreter.run(state.plan.programs[0].step, step, metrics)
        losses.append(reduce_parts([metrics.parts()])["actor/loss"])
    return losses


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_a_loaded_state_goes_on_bit_for_bit(new_state: NewState, folder: Path) -> None:
    """Weights, moments, update count (warm-up, bias correction), cursor, version and seed."""
    straight, first = new_state(), new_state()
    expected = run(straight, 1, 4)
    assert run(first, 1, 2) == expected[:2]
    save_checkpoint(first, folder, 2)
    second = new_state()
    second.seed = 99
    load_checkpoint(second, folder, 2)
    assert (second.cursors, second.seed, second.models["actor"].version) == ({"questions": 6}, 0, 2)
    assert run(second, 3, 4) == expected[2:]
    assert weights_digest(second) == weights_digest(straight) != weights_digest(first)


def test_the_pointer_names_the_newest(new_state: NewState, folder: Path) -> None:
    assert latest_step(folder) is None
    state = new_state()
    for step in (0, 2, 10):
        save_checkpoint(state, folder, step)
        assert latest_step(folder) == step
    save_checkpoint(state, folder, 10)
    assert sorted(p.name for p in folder.iterdir()) == ["global_step_0", "global_step_10", "global_step_2", LATEST]
    assert older_hint(folder, 10).startswith("write 2 into")


@pytest.mark.parametrize("failing", ["weights", "optimizer", "rename"])
def test_a_failed_write_leaves_the_one_before(
    new_state: NewState, folder: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = new_state()
    save_checkpoint(state, folder, 1)

    def full(*args: Any, **named: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc] file write failed")  # as torch says it

    target = {"weights": (checkpoint, "save_model"), "optimizer": (dcp, "save"), "rename": (parts.os, "replace")}
    monkeypatch.setattr(*target[failing], full)
    with pytest.raises(RunFailure, match="the checkpoint of step 2 cannot be written") as failure:
        save_checkpoint(state, folder, 2)
    monkeypatch.undo()
    assert failure.value.code == "RLF5010"
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_1", LATEST]
    assert latest_step(folder) == 1


@pytest.mark.parametrize(
    "broken",
    [
        "state.json",
        "actor.training/.metadata",
        "actor.training/__0_0.distcp",
        "actor/model.safetensors",
        "actor/config.json",
    ],
)
@pytest.mark.parametrize("how", ["gone", "half"])
def test_a_broken_checkpoint(new_state: NewState, folder: Path, broken: str, how: str) -> None:
    state = new_state()
    run(state, 1, 1)
    path = save_checkpoint(state, folder, 1) / broken
    raw = path.read_bytes()
    path.unlink()
    if how == "half":
        path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(RunFailure) as failure:
        load_checkpoint(new_state(), folder, 1)
    assert failure.value.code == "RLF5010"
    assert str(folder / "global_step_1") in failure.value.message
    assert failure.value.help == ("start the run anew in another folder: there is no other checkpoint",)


def test_other_data(new_state: NewState, folder: Path, tmp_path: Path) -> None:
    save_checkpoint(new_state(), folder, 1)
    with (tmp_path / "data.jsonl").open("a") as data:
        data.write('{"question": "9+9=", "answer": "18"}\n')
    with pytest.raises(RunFailure, match="data `questions` is not what it was") as failure:
        load_checkpoint(new_state(), folder, 1)
    assert failure.value.code == "RLF5010"


def test_a_pointer_to_nothing(new_state: NewState, folder: Path) -> None:
    path = save_checkpoint(new_state(), folder, 3)
    (path / "state.json").unlink()
    with pytest.raises(RunFailure, match="`3`, which is not there or not whole"):
        latest_step(folder)
    (folder / LATEST).write_text("three", "utf-8")
    with pytest.raises(RunFailure, match="`three`"):
        latest_step(folder)


def test_state_json_is_plain(new_state: NewState, folder: Path) -> None:
    body = json.loads((save_checkpoint(new_state(), folder, 1) / "state.json").read_text("utf-8"))
    assert body["step"] == 1
    assert body["versions"] == {"actor": 0}
    assert body["models"].keys() == {"actor"}
