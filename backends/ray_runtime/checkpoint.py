"""Checkpoints of a run: a Hugging Face folder per trained model, and what training needs to go on.

`checkpoints/global_step_N/` holds `<model>/` (config, safetensors, tokenizer; of a value model the body and its head,
see heads.py; of a model with adapters the folder `adapter/`, and in the last checkpoint of a run the merged weights
too), `<model>.training.pt` (optimizer) and `state.json` (step, cursors, versions, seed, data
fingerprints, and `edges`: by streamed stage which prompts have ended, see streams). It is
written beside its place and renamed, so a checkpoint is whole or not there;
`latest_checkpointed_iteration.txt` names the newest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime.checkpoint_folder import LATEST, STATE, checkpoint_path, older_hint
from rlflow.backends.ray_runtime.devices.swap import host_copy
from rlflow.backends.ray_runtime.models import load_weights, save_model
from rlflow.backends.ray_runtime.sharded_checkpoint import is_sharded, load_engine, load_sharded, save_sharded
from rlflow.backends.ray_runtime.state import ModelState, RankState
from rlflow.backends.ray_runtime.streams.session import trained_cursors
from rlflow.diagnostics.diagnostic import RunFailure


def save_checkpoint(
    state: RankState,
    folder: Path,
    step: int,
    merged: bool = False,
    is_last_part: Callable[[int], bool] = lambda step: True,
) -> Path:
    """Write the state after `step` steps; returns the checkpoint's folder. RLF5010 when the disk refuses.

    All ranks of the pool call; the first writes what all share. Every pool that trains writes a part; the one that
    `is_last_part` says is the last puts them together.
    `merged`: of models with adapters also the weights with the adapters added, which no resume needs.
    """
    target = checkpoint_path(folder, step)
    building = folder / f".global_step_{step}.{state.pool}.partial"

    def begin() -> None:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)

    def finish() -> None:
        _write_state(state, building, step)
        for path in building.rglob("*"):
            if path.is_file():
                _sync(path)
        if is_last_part(step):
            _join_parts(building, [p for p in folder.glob(f".global_step_{step}.*.partial") if p != building])
            _publish(building, target, folder, step)

    try:
        _together(state, begin, folder, step, only_first=True)
        _together(state, lambda: _write_models(state, building, merged), folder, step)
        _together(state, finish, folder, step, only_first=True)
    except RunFailure:
        if state.rank == 0:
            shutil.rmtree(building, ignore_errors=True)
        raise
    return target


def _together(state: RankState, action: Callable[[], None], folder: Path, step: int, only_first: bool = False) -> None:
    """An action on all ranks, or on the first while the others wait. RLF5010 on all where it fails on one."""
    problem = ""
    try:
        if state.rank == 0 or not only_first:
            action()
    except Exception as error:  # torch and safetensors have exceptions of their own for a full disk
        problem = f"{type(error).__name__}: {error}"
    problems = [problem]
    if state.group is not None:
        problems = [""] * state.world
        dist.all_gather_object(problems, problem, group=state.group)
    if any(problems):
        raise RunFailure(
            "RLF5010",
            f"the checkpoint of step {step} cannot be written to `{folder}`",
            notes=("earlier checkpoints are untouched", next(problem for problem in problems if problem)),
        )


def _trained(state: RankState) -> list[tuple[str, ModelState]]:
    names = [declared.name for declared in state.plan.models]
    return [(name, state.models[name]) for name in names if name in state.models and state.trains(name)]


def _write_models(state: RankState, building: Path, merged: bool) -> None:
    for name, model in _trained(state):
        assert model.trainer is not None
        if is_sharded(model):
            save_sharded(model, building / name, writes=state.rank == 0)
            torch.save(model.trainer.state_dict(), building / _training_file(name, model, state.rank))
        elif state.rank == 0:
            save_model(model.loaded, building / name, merged)
            torch.save(model.trainer.state_dict(), building / _training_file(name, model, 0))


def _training_file(name: str, model: ModelState, rank: int) -> str:
    """The optimizer's file; of a model in parts every rank has one, which names the layout that it belongs to."""
    if not is_sharded(model):
        return f"{name}.training.pt"
    assert model.mesh is not None
    layout = model.mesh.layout
    axes = "-".join(
        f"{axis}{size}" for axis in ("dp", "tp", "pp", "ep", "etp", "zero") if (size := getattr(layout, axis))
    )
    return f"{name}.training.{axes}.{rank}.pt"


def _write_state(state: RankState, building: Path, step: int) -> None:
    body = {
        "step": step,
        "cursors": state.cursors,
        "versions": {name: model.version for name, model in _trained(state)},
        "seed": state.seed,
        "edges": trained_cursors(state),
        "data": state.fingerprints | {name: data.fingerprint for name, data in state.data.items()},
    }
    (building / STATE).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", "utf-8")


def _publish(building: Path, target: Path, folder: Path, step: int) -> None:
    """Rename into place, and point to it."""
    if target.exists():
        shutil.rmtree(target)
    os.replace(building, target)
    pointer = folder / (LATEST + ".partial")
    pointer.write_text(f"{step}\n", "utf-8")
    _sync(pointer)
    os.replace(pointer, folder / LATEST)


def _join_parts(whole: Path, parts: list[Path]) -> None:
    """Move what other pools wrote into `whole`. Versions are each pool's own; cursors are those furthest on."""
    body = json.loads((whole / STATE).read_text("utf-8"))
    for part in parts:
        other = json.loads((part / STATE).read_text("utf-8"))
        body["versions"] |= other["versions"]
        body["data"] |= other["data"]
        body["edges"] |= other["edges"]
        cursors = body["cursors"]
        body["cursors"] = {
            name: max(cursors.get(name, 0), other["cursors"].get(name, 0)) for name in {*cursors, *other["cursors"]}
        }
        for path in part.iterdir():
            if path.name != STATE:
                os.replace(path, whole / path.name)
        shutil.rmtree(part)
    if parts:
        (whole / STATE).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", "utf-8")
        _sync(whole / STATE)


def load_checkpoint(state: RankState, folder: Path, step: int) -> None:
    """Bring models, optimizers, cursors and versions back to the state after `step` steps. RLF5010 when broken."""
    source = checkpoint_path(folder, step)
    try:
        body: dict[str, Any] = json.loads((source / STATE).read_text("utf-8"))
        _check_data(state, body["data"])
        for name, version in body["versions"].items():
            model = state.models.get(name)
            if model is None:
                continue  # another pool's
            if is_sharded(model):
                load_sharded(model, source / name)
            elif model.trainer is not None or not model.engine_fed:
                load_weights(model.loaded, source / name)
            if model.trainer is not None and state.trains(name):
                model.trainer.load_state_dict(_optimizer(source, name, model, state.rank))
            if model.engine_fed:
                load_engine(model, source / name, version)
            model.restart(version)
        state.cursors.update({name: int(cursor) for name, cursor in body["cursors"].items()})
        state.seed = int(body["seed"])
        state.stream_cursors = dict(body.get("edges", {}))
    except RunFailure:
        raise
    except Exception as error:
        raise RunFailure(
            "RLF5010",
            f"checkpoint `{source}` cannot be read",
            notes=(f"{type(error).__name__}: {error}",),
            help=(older_hint(folder, step),),
        ) from None


def _optimizer(source: Path, name: str, model: ModelState, rank: int) -> dict[str, Any]:
    """The optimizer's state of this rank. RLF5010 when it was written under another layout."""
    path = source / _training_file(name, model, rank)
    others = sorted(found.name for found in source.glob(f"{name}.training.*pt"))
    if not path.is_file() and others:
        raise RunFailure(
            "RLF5010",
            f"the optimizer state of `{name}` was written under another layout",
            notes=(f"wanted: `{path.name}`, there are: {', '.join(f'`{other}`' for other in others)}",),
            help=("resume with the layout of the run", f"or start a new run from the model folder `{source / name}`"),
        )
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def weights_digest(state: RankState) -> str:
    """sha256 (hex) of the trained weights that all ranks of the pool hold."""
    digest = hashlib.sha256()
    for declared in state.plan.models:
        model = state.models.get(declared.name)
        if model is not None and state.trains(declared.name) and not is_sharded(model):
            for parameter in model.loaded.model.parameters():
                digest.update(host_copy(parameter).view(torch.uint8).numpy())
    return digest.hexdigest()


def _check_data(state: RankState, fingerprints: dict[str, str]) -> None:
    """A cursor into other data would repeat rows and leave others out."""
    for name, data in state.data.items():
        if fingerprints.get(name, data.fingerprint) != data.fingerprint:
            raise RunFailure(
                "RLF5010",
                f"data `{name}` is not what it was when the checkpoint was written",
                notes=(f"sha256 then {fingerprints[name][:16]}..., now {data.fingerprint[:16]}...",),
                help=("put the old data back, or start a new run from the checkpoint's model folder",),
            )


def _sync(path: Path) -> None:
    """Force a file to the disk before it is renamed into place."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
