"""Checkpoints of a run: a Hugging Face folder per trained model, and what training needs to go on.

`checkpoints/global_step_N/` holds `<model>/` (config, safetensors, tokenizer; of a value model the body and its head,
see heads.py; of a model with adapters the folder `adapter/`, and in the last checkpoint of a run the merged weights
too), `<model>.training.pt` (optimizer) and `state.json` (step, cursors, versions, seed, data fingerprints). It is
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

from rlflow.backends.ray_runtime.checkpoint_folder import LATEST, STATE, checkpoint_path, older_hint
from rlflow.backends.ray_runtime.models import load_weights, save_model
from rlflow.backends.ray_runtime.state import RankState
from rlflow.diagnostics.diagnostic import RunFailure


def save_checkpoint(
    state: RankState,
    folder: Path,
    step: int,
    merged: bool = False,
    is_last_part: Callable[[int], bool] = lambda step: True,
) -> Path:
    """Write the state after `step` steps; returns the checkpoint's folder. RLF5010 when the disk refuses.

    Every pool that trains writes a part; the one that `is_last_part` says is the last puts them together.
    `merged`: of models with adapters also the weights with the adapters added, which no resume needs.
    """
    target = checkpoint_path(folder, step)
    building = folder / f".global_step_{step}.{state.pool}.partial"
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        versions: dict[str, int] = {}
        for declared in state.plan.models:
            model = state.models.get(declared.name)
            if model is None or model.trainer is None or not state.trains(declared.name):
                continue
            save_model(model.loaded, building / declared.name, merged)
            torch.save(model.trainer.state_dict(), building / f"{declared.name}.training.pt")
            versions[declared.name] = model.version
        body = {
            "step": step,
            "cursors": state.cursors,
            "versions": versions,
            "seed": state.seed,
            "data": state.fingerprints | {name: data.fingerprint for name, data in state.data.items()},
        }
        (building / STATE).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", "utf-8")
        for path in building.rglob("*"):
            if path.is_file():
                _sync(path)
        if not is_last_part(step):
            return target
        _join_parts(building, [p for p in folder.glob(f".global_step_{step}.*.partial") if p != building])
        if target.exists():
            shutil.rmtree(target)
        os.replace(building, target)
        pointer = folder / (LATEST + ".partial")
        pointer.write_text(f"{step}\n", "utf-8")
        _sync(pointer)
        os.replace(pointer, folder / LATEST)
    except Exception as error:  # torch and safetensors have exceptions of their own for a full disk
        shutil.rmtree(building, ignore_errors=True)
        raise RunFailure(
            "RLF5010",
            f"the checkpoint of step {step} cannot be written to `{folder}`",
            notes=("earlier checkpoints are untouched", f"{type(error).__name__}: {error}"),
        ) from None
    return target


def _join_parts(whole: Path, parts: list[Path]) -> None:
    """Move what other pools wrote into `whole`. Versions are each pool's own; cursors are those furthest on."""
    body = json.loads((whole / STATE).read_text("utf-8"))
    for part in parts:
        other = json.loads((part / STATE).read_text("utf-8"))
        body["versions"] |= other["versions"]
        body["data"] |= other["data"]
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
            load_weights(model.loaded, source / name)
            if model.trainer is not None and state.trains(name):
                training = torch.load(source / f"{name}.training.pt", weights_only=True)
                model.trainer.load_state_dict(training)
            model.version = version
            model.restart(version)
        state.cursors.update({name: int(cursor) for name, cursor in body["cursors"].items()})
        state.seed = int(body["seed"])
    except RunFailure:
        raise
    except Exception as error:
        raise RunFailure(
            "RLF5010",
            f"checkpoint `{source}` cannot be read",
            notes=(f"{type(error).__name__}: {error}",),
            help=(older_hint(folder, step),),
        ) from None


def weights_digest(state: RankState) -> str:
    """sha256 (hex) of all trained weights on this rank."""
    digest = hashlib.sha256()
    for declared in state.plan.models:
        model = state.models.get(declared.name)
        if model is not None and declared.trainable:
            for parameter in model.loaded.model.parameters():
                digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
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
