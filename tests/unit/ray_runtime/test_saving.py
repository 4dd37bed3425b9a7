"""What can go wrong with checkpoints on a disk, and which of them stay."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.backends.ray_runtime.checkpoint import load_checkpoint, save_checkpoint, training_part, write_part
from rlflow.backends.ray_runtime.checkpoint_folder import LATEST, latest_step, verify, whole_steps
from rlflow.backends.ray_runtime.deliveries import Reading
from rlflow.backends.ray_runtime.parallel.regions import boxes
from rlflow.backends.ray_runtime.saving.parts import clean, part_path
from rlflow.backends.ray_runtime.saving.writer import Writer
from rlflow.backends.ray_runtime.state import RankState
from rlflow.diagnostics import RunFailure
from rlflow.plan import Evaluation

NewState = Callable[..., RankState]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """The system refuses to write more into a file, in the middle of it, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def damage(path: Path, how: str) -> None:
    raw = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "short":
        path.write_bytes(raw[:-1])
    else:
        at = len(raw) // 2
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])


FILES = ("actor/model.safetensors", "actor.training/__0_0.distcp", "state.json")


@pytest.mark.parametrize("how", ["gone", "short", "flipped"])
def test_damage_is_found_and_named(new_state: NewState, folder: Path, how: str) -> None:
    state = new_state()
    for step in (1, 2):
        save_checkpoint(state, folder, step)
    for file in FILES:
        save_checkpoint(state, folder, 3)
        verify(folder, 3)
        damage(folder / "global_step_3" / file, how)
        with pytest.raises(RunFailure) as failure:
            verify(folder, 3)
        assert failure.value.code == "RLF5045"
        assert failure.value.message.startswith(f"`{file}` of the checkpoint of step 3")
        assert failure.value.help[0].startswith("write 2 into")
    damage(folder / "global_step_2" / FILES[0], "flipped")
    with pytest.raises(RunFailure) as failure:
        verify(folder, 3)
    assert failure.value.help[0].startswith("write 1 into"), "the newest other one that is whole"


def test_a_disk_that_is_full_in_the_middle(new_state: NewState, folder: Path) -> None:
    """While training goes on: it is told at the next step, and the checkpoint before is what the pointer names."""
    state, writer = new_state(), Writer()
    save_checkpoint(state, folder, 1)
    part = training_part(state, 2)
    with no_file_above(20_000):
        writer.submit(2, lambda: write_part(part, folder, None, lambda step: True))
        writer.wait(30)
    for call in (writer.check, writer.settle, writer.close):
        with pytest.raises(RunFailure, match="the checkpoint of step 2 cannot be written") as failure:
            call()
        assert failure.value.code == "RLF5010"
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_1", LATEST]
    verify(folder, 1)
    assert latest_step(folder) == 1


def test_a_copy_of_one_moment_is_written(new_state: NewState, folder: Path) -> None:
    """What training does while the thread writes is not in the checkpoint, and a second one waits for the first."""
    state, writer, go_on = new_state(), Writer(), threading.Event()
    before = {name: tensor.clone() for name, tensor in state.models["actor"].loaded.model.state_dict().items()}
    part = training_part(state, 1)

    def write() -> bool:
        go_on.wait(30)
        return write_part(part, folder, None, lambda step: True)

    writer.submit(1, write)
    with torch.no_grad():
        for parameter in state.models["actor"].loaded.model.parameters():
            parameter.add_(1.0)
    second = threading.Thread(target=writer.submit, args=(2, lambda: False))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert writer.published == 0
    go_on.set()
    second.join(30)
    writer.close()
    assert writer.published == 1
    other = new_state()
    load_checkpoint(other, folder, 1)
    found = other.models["actor"].loaded.model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


def test_only_the_newest_are_kept(new_state: NewState, folder: Path) -> None:
    state = new_state()
    for step in (1, 2, 3, 9):
        save_checkpoint(state, folder, step)
    (folder / LATEST).write_text("3\n", "utf-8")  # the run goes back: step 9 is that of a future that was given up
    save_checkpoint(state, folder, 4, keep=2)
    assert whole_steps(folder) == [3, 4, 9]
    save_checkpoint(state, folder, 5, keep=1)
    assert whole_steps(folder) == [5, 9]
    assert latest_step(folder) == 5
    assert not list(folder.glob(".*"))


def test_what_a_killed_run_left_is_removed(new_state: NewState, folder: Path) -> None:
    """Half a part, half a removal, and a checkpoint that was being replaced."""
    state = new_state()
    for step in (1, 2):
        save_checkpoint(state, folder, step)
    half = part_path(folder, 3, "rollout.ahead")
    half.mkdir()
    (half / "state.json").write_text("{", "utf-8")
    (folder / "global_step_2").rename(folder / ".global_step_2.replaced")
    (folder / "global_step_1").rename(folder / ".global_step_1.pruned")
    (folder / (LATEST + ".partial")).write_text("3", "utf-8")
    clean(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_2", LATEST]
    assert latest_step(folder) == 2
    verify(folder, 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"flow": "products"}, "it is one of flow `products`, and the plan is that of flow `sums`"),
        ({"versions": {}}, "it has no model `actor`, which the plan trains"),
        ({"versions": {"actor": 1, "critic": 1}}, "it holds the model `critic`, which the plan does not train"),
        ({"models": {"actor": 7}}, "its `actor` has 7 parameters, and the plan's has"),
    ],
)
def test_a_checkpoint_of_another_plan(new_state: NewState, folder: Path, change: dict[str, Any], says: str) -> None:
    path = save_checkpoint(new_state(), folder, 1) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change), "utf-8")
    with pytest.raises(RunFailure) as failure:
        load_checkpoint(new_state(), folder, 1)
    assert failure.value.code == "RLF5046"
    assert says in failure.value.message


def test_a_pool_gets_back_what_it_owns(new_state: NewState, folder: Path) -> None:
    class Edge:
        count = 0

        def saved(self, step: int) -> dict[str, int]:
            return {"count": self.count, "step": step}

        def restore(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    first, second = new_state(), new_state()
    first.owned["edges"], second.owned["edges"] = Edge(), Edge()
    first.owned["edges"].count = 5  # type: ignore[attr-defined]
    save_checkpoint(first, folder, 1)
    load_checkpoint(second, folder, 1)
    assert second.owned["edges"].saved(1) == {"count": 5, "step": 1}


def test_an_optimizer_of_an_older_version_is_read(new_state: NewState, folder: Path) -> None:
    """No manifest, no `models`, and one file of torch.save."""
    state = new_state()
    path = save_checkpoint(state, folder, 1)
    trainer = state.models["actor"].trainer
    assert trainer is not None
    trainer.updates = 7
    torch.save(trainer.state_dict(), path / "actor.training.pt")
    for file in (path / "actor.training").iterdir():
        file.unlink()
    (path / "actor.training").rmdir()
    (path / "manifest.json").unlink()
    body = json.loads((path / "state.json").read_text("utf-8"))
    kept = {name: body[name] for name in ("step", "cursors", "versions", "seed", "data")}
    (path / "state.json").write_text(json.dumps(kept), "utf-8")
    verify(folder, 1)
    other = new_state()
    load_checkpoint(other, folder, 1)
    assert other.models["actor"].trainer is not None
    assert other.models["actor"].trainer.updates == 7


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_boxes_tile_a_range(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    low = data.draw(st.integers(0, whole.numel()))
    high = data.draw(st.integers(low, whole.numel()))
    found = [value for box in boxes(tuple(shape), low, high) for value in whole[box].reshape(-1).tolist()]
    assert found == list(range(low, high))


@given(st.integers(0, 4), st.integers(0, 5), st.integers(0, 9), st.integers(1, 6))
def test_steps_ahead_are_those_that_a_resumed_run_would_sample_anew(lag: int, every: int, done: int, more: int) -> None:
    """A reader that has version `done` from its checkpoint reads as an uninterrupted one from the first step that is
    not ahead, and with newer weights before."""
    reading = Reading(True, lag, (Evaluation(name="held", every=every, instructions=()),) if every else ())
    ahead = reading.ahead(done)
    for step in range(done + 1, done + more + lag):
        resumed = max(done, reading.version_at(step))
        assert (resumed != reading.version_at(step)) == (step in ahead)
