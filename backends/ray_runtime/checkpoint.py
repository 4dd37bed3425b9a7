"""Checkpoints of a run: a Hugging Face folder per trained model, and what training needs to go on.

`checkpoints/global_step_N/` holds
* `<model>/`: config, safetensors, tokenizer; of a value model the body and its head, see heads.py; of a model with
  adapters the folder `adapter/`, and in the last checkpoint of a run the merged weights too,
* `<model>.training/`: the optimizer, in parts of the ranks, see saving/optimizer.py,
* `ahead/`: samples of the steps that follow, see saving/ahead.py,
* `state.json`: step, cursors, versions, seed, data fingerprints, by streamed stage which prompts have ended (streams),
  and what pools own (saving/owned.py),
* `manifest.json`: sizes and digests of all of these.

A checkpoint is a copy of one moment, taken in host memory and written beside the steps that follow. Every pool with
something to save writes a part of it (saving/parts.py); it is renamed into its place when the last part is there, so it
is whole or not there. `latest_checkpointed_iteration.txt` names the newest.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime.checkpoint_folder import STATE, checkpoint_path, older_hint
from rlflow.backends.ray_runtime.devices.swap import host_copy
from rlflow.backends.ray_runtime.models import load_weights, save_model
from rlflow.backends.ray_runtime.saving.ahead import AheadPart
from rlflow.backends.ray_runtime.saving.ahead_file import ahead_path, read_ahead, write_ahead
from rlflow.backends.ray_runtime.saving.host_twin import host_twin, own_tokenizer
from rlflow.backends.ray_runtime.saving.manifest import FORMAT, Entries, entries_of
from rlflow.backends.ray_runtime.saving.optimizer import OtherOptimizer, optimizer_pieces, restore_optimizer
from rlflow.backends.ray_runtime.saving.parts import begin_part, end_part, files_below, part_path, publish
from rlflow.backends.ray_runtime.saving.pieces import write_pieces
from rlflow.backends.ray_runtime.sharded_checkpoint import (
    is_sharded,
    load_engine,
    load_sharded,
    whole_tensors,
    write_whole,
)
from rlflow.backends.ray_runtime.state import ModelState, RankState
from rlflow.backends.ray_runtime.streams.session import trained_cursors
from rlflow.diagnostics.diagnostic import RunFailure

T = TypeVar("T")
Write = Callable[[Path, "dist.ProcessGroup | None"], None]
"""Writes something into a folder; the group is one that only the writing threads of the pool's ranks use."""


@dataclass
class Part:
    """A pool's part of a checkpoint as this rank has it, copied: nothing that happens later changes it."""

    name: str
    step: int
    rank: int
    state: dict[str, Any]
    """What the first rank writes into `state.json`."""
    files: list[Write] = field(default_factory=list)


# --- taking a copy ---------------------------------------------------------------------------------------------------


def training_part(state: RankState, step: int, merged: bool = False) -> Part:
    """What a pool has trained in `step` steps. All ranks of the pool call.

    `merged`: of models with adapters also the weights with the adapters added, which no resume needs.
    """
    part = Part(state.pool, step, state.rank, captured(state, step))
    for name, model in _trained(state):
        assert model.trainer is not None
        part.state["versions"][name] = model.version
        part.state["models"][name] = model.parameters
        folder = f"{name}.training"
        if is_sharded(model):
            found, pieces = whole_tensors(model, merged), optimizer_pieces(model.trainer)
            tokenizer = own_tokenizer(model.loaded)
            if state.rank == 0:
                whole = functools.partial(write_whole, found, model, tokenizer, merged=merged)
                part.files.append(lambda at, _, n=name, w=whole: w(at / n))  # type: ignore[misc]
            part.files.append(lambda at, group, f=folder, p=pieces: write_pieces(p, at / f, group))  # type: ignore[misc]
        elif state.rank == 0:
            twin, pieces = host_twin(model.loaded), optimizer_pieces(model.trainer)
            part.files.append(lambda at, _, n=name, t=twin: save_model(t, at / n, merged))  # type: ignore[misc]
            part.files.append(lambda at, _, f=folder, p=pieces: write_pieces(p, at / f, None))  # type: ignore[misc]
    return part


def ahead_part(state: RankState, kept: AheadPart) -> Part:
    """The samples of the steps after `kept.step` that are in no queue and no weights of a later resume."""
    body = kept.state | {"ahead": {state.pool: state.world}}
    path = ahead_path(Path(), state.pool, state.rank)
    return Part(f"{state.pool}.ahead", kept.step, state.rank, body, [lambda at, _: write_ahead(kept, at / path)])


def captured(state: RankState, step: int) -> dict[str, Any]:
    """A rank's state after `step` steps, beside its models: JSON. The first rank's is written."""
    owned = {name: each.saved(step) for name, each in state.owned.items()}
    return {
        "format": FORMAT,
        "flow": state.plan.flow,
        "step": step,
        "cursors": dict(state.cursors),
        "versions": {},
        "models": {},
        "ahead": {},
        "owned": {state.pool: owned} if owned else {},
        "seed": state.seed,
        "edges": trained_cursors(state) if state.rank == 0 else {},
        "data": state.fingerprints | {name: data.fingerprint for name, data in state.data.items()},
    }


def _trained(state: RankState) -> list[tuple[str, ModelState]]:
    names = [declared.name for declared in state.plan.models]
    return [(name, state.models[name]) for name in names if name in state.models and state.trains(name)]


# --- writing ---------------------------------------------------------------------------------------------------------


def save_checkpoint(
    state: RankState,
    folder: Path,
    step: int,
    merged: bool = False,
    is_last_part: Callable[[int], bool] = lambda step: True,
    keep: int = 0,
) -> Path:
    """Write the state after `step` steps, and wait for it; returns the checkpoint's folder. See `write_part`."""
    write_part(training_part(state, step, merged), folder, state.group, is_last_part, keep)
    return checkpoint_path(folder, step)


def write_part(
    part: Part,
    folder: Path,
    group: dist.ProcessGroup | None,
    is_last_part: Callable[[int], bool],
    keep: int = 0,
) -> bool:
    """Write a part into the run's `checkpoints`; whether the checkpoint is whole now. RLF5010 when the disk refuses.

    All ranks of the pool call, which are those of `group`. The one that `is_last_part` says is the last puts the parts
    together, and removes what is older than the `keep` newest checkpoints (0 = nothing).
    """
    building = part_path(folder, part.step, part.name)

    def write() -> None:
        for file in part.files:
            file(building, group)

    def finish(entries: Entries) -> bool:
        end_part(building, part.state, entries)
        if not is_last_part(part.step):
            return False
        publish(folder, part.step, building, keep)
        return True

    def together(action: Callable[[], T], only_first: bool = False) -> list[T | None]:
        return _together(part, group, action, folder, only_first)

    try:
        together(lambda: begin_part(building), only_first=True)
        together(write)
        paths = together(lambda: files_below(building), only_first=True)[0] or []
        mine = paths[part.rank :: 1 if group is None else dist.get_world_size(group)]
        entries: Entries = {}
        for found in together(lambda: entries_of(building, mine)):
            entries |= found or {}
        return bool(together(lambda: finish(entries), only_first=True)[0])
    except RunFailure:
        if part.rank == 0:
            shutil.rmtree(building, ignore_errors=True)
        raise


def _together(
    part: Part, group: dist.ProcessGroup | None, action: Callable[[], T], folder: Path, only_first: bool
) -> list[T | None]:
    """What an action gives on all ranks, or on the first while the others wait. RLF5010 on all if it fails on one."""
    answer: tuple[T | None, str] = None, ""
    try:
        if part.rank == 0 or not only_first:
            answer = action(), ""
    except Exception as error:  # torch and safetensors have exceptions of their own for a full disk
        answer = None, f"{type(error).__name__}: {error}"
    answers: list[Any] = [answer]
    if group is not None:
        answers = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, answer, group=group)
    problems = [problem for _, problem in answers if problem]
    if problems:
        raise RunFailure(
            "RLF5010",
            f"the checkpoint of step {part.step} cannot be written to `{folder}`",
            notes=("earlier checkpoints are untouched", problems[0]),
        )
    return [found for found, _ in answers]


# --- reading ---------------------------------------------------------------------------------------------------------


def load_checkpoint(state: RankState, folder: Path, step: int) -> None:
    """Bring models, optimizers, cursors and versions back to the state after `step` steps.

    RunFailure: RLF5010 when it cannot be read, or the data are others; RLF5046 when it is that of another plan.
    """
    source = checkpoint_path(folder, step)
    try:
        body: dict[str, Any] = json.loads((source / STATE).read_text("utf-8"))
        _check_plan(state, body, source)
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
                _load_optimizer(source, name, model, state.rank)
            if model.engine_fed:
                load_engine(model, source / name, version)
            model.restart(version)
        state.cursors.update({name: int(cursor) for name, cursor in body["cursors"].items()})
        state.seed = int(body["seed"])
        if state.ahead.stages and state.pool in body.get("ahead", {}):
            state.ahead.resume(read_ahead(ahead_path(source, state.pool, state.rank)))
        for name, owned in body.get("owned", {}).get(state.pool, {}).items():
            if name in state.owned:
                state.owned[name].restore(owned)
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


def _load_optimizer(source: Path, name: str, model: ModelState, rank: int) -> None:
    assert model.trainer is not None
    folder = source / f"{name}.training"
    if not folder.is_dir():
        model.trainer.load_state_dict(_old_optimizer(source, name, model, rank))
        return
    try:
        restore_optimizer(model.trainer, folder)
    except OtherOptimizer as error:
        raise _other(source, f"its optimizer of `{name}` is that of another model: {error}") from None


def _old_optimizer(source: Path, name: str, model: ModelState, rank: int) -> dict[str, Any]:
    """The optimizer of this rank as versions before the manifest wrote it: a file of torch.save for each rank, which
    names its layout. RLF5010 when it was another one."""
    path = source / f"{name}.training.pt"
    if is_sharded(model):
        assert model.mesh is not None
        layout = model.mesh.layout
        sizes = {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "ep", "etp", "zero")}
        axes = "-".join(f"{axis}{size}" for axis, size in sizes.items() if size)
        path = source / f"{name}.training.{axes}.{rank}.pt"
    others = sorted(found.name for found in source.glob(f"{name}.training.*pt"))
    if not path.is_file() and others:
        raise RunFailure(
            "RLF5010",
            f"the optimizer state of `{name}` was written under another layout, by a version that needs the same again",
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


def _check_plan(state: RankState, body: dict[str, Any], source: Path) -> None:
    """What was trained must be what is to be trained, on the ranks that have samples of it."""
    flow = body.get("flow", state.plan.flow)
    if flow != state.plan.flow:
        raise _other(source, f"it is one of flow `{flow}`, and the plan is that of flow `{state.plan.flow}`")
    trained = {declared.name for declared in state.plan.models if declared.trainable}
    held = set(body["versions"])
    for name in sorted(trained - held):
        raise _other(source, f"it has no model `{name}`, which the plan trains")
    for name in sorted(held - trained):
        raise _other(source, f"it holds the model `{name}`, which the plan does not train")
    for name, parameters in body.get("models", {}).items():
        model = state.models.get(name)
        if model is not None and state.trains(name) and model.parameters != parameters:
            raise _other(source, f"its `{name}` has {parameters} parameters, and the plan's has {model.parameters}")
    ahead: dict[str, int] = body.get("ahead", {})
    if not state.ahead.stages or not ahead:
        return
    if state.pool not in ahead:
        pools = " and ".join(f"`{pool}`" for pool in sorted(ahead))
        raise _other(
            source, f"the samples of its next steps were made on {pools}, and the plan makes them on `{state.pool}`"
        )
    if ahead[state.pool] != state.world:
        raise _other(
            source,
            f"the samples of its next steps were made on {ahead[state.pool]} ranks of pool `{state.pool}`, which has "
            f"{state.world} now",
        )


def _other(source: Path, why: str) -> RunFailure:
    return RunFailure(
        "RLF5046",
        f"checkpoint `{source}` belongs to another plan: {why}",
        help=("resume with the plan of the run", "or start a new run from the checkpoint's model folder"),
    )


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
