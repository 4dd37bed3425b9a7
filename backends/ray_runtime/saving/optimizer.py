"""A trainer's optimizer by the weights that its moments belong to, so that another layout can go on with it.

In a checkpoint: `updates`, and for every trained weight `WEIGHT.exp_avg` and `WEIGHT.exp_avg_sq` as in the whole model,
and `WEIGHT.step`, the number of updates that moved it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlflow.backends.ray_runtime.devices.swap import host_copy
from rlflow.backends.ray_runtime.parallel.regions import Region
from rlflow.backends.ray_runtime.saving.pieces import Piece, Pieces, read_pieces, shapes_in
from rlflow.backends.ray_runtime.trainer import Trainer

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"
_UPDATES = "updates"


class OtherOptimizer(Exception):
    """A checkpoint's optimizer is that of another model; the text says what differs."""


def optimizer_pieces(trainer: Trainer) -> dict[str, Pieces]:
    """A copy on the host of this rank's part. Before the first update there is only their number."""
    state = trainer.state_dict()
    found = {_UPDATES: _scalar(torch.tensor([state["updates"]], dtype=torch.int64))}
    moments: dict[int, dict[str, torch.Tensor]] = (state["optimizer"] or {"state": {}})["state"]
    for number, regions in enumerate(trainer.regions()):
        if number not in moments:
            continue  # no gradient yet
        copies = {name: host_copy(moments[number][name]) for name in _MOMENTS}
        for region in regions:
            if not region.first:
                continue
            for name, copy in copies.items():
                piece = Piece(region.offsets, region.of(copy))
                found.setdefault(f"{region.name}.{name}", Pieces(region.shape, [])).pieces.append(piece)
            count = torch.tensor([float(moments[number][_STEP])], dtype=torch.float32)
            found[f"{region.name}.{_STEP}"] = _scalar(count)
    return found


def restore_optimizer(trainer: Trainer, folder: Path) -> None:
    """Take this rank's part out of what ranks of any layout wrote. OtherOptimizer where the weights are others."""
    shapes = shapes_in(folder)
    updates = torch.zeros(1, dtype=torch.int64)
    wanted: dict[str, Pieces] = {_UPDATES: _scalar(updates)}
    steps: dict[str, torch.Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    counted: dict[int, list[str]] = {}
    regions_of = trainer.regions()
    _refuse_others(regions_of, shapes)
    for number, (moved, regions) in enumerate(zip(trainer.moved_tensors(), regions_of, strict=True)):
        there = [region for region in regions if f"{region.name}.{_STEP}" in shapes]
        if not there:
            continue
        state[number] = {name: torch.zeros_like(moved.detach()) for name in _MOMENTS}
        for region in there:
            for name in _MOMENTS:
                piece = Piece(region.offsets, region.of(state[number][name]))
                wanted.setdefault(f"{region.name}.{name}", Pieces(region.shape, [])).pieces.append(piece)
            steps[region.name] = torch.zeros(1, dtype=torch.float32)
            wanted[f"{region.name}.{_STEP}"] = _scalar(steps[region.name])
        counted[number] = [region.name for region in there]
    read_pieces(wanted, folder)
    for number, names in counted.items():
        state[number][_STEP] = torch.tensor(max(float(steps[name]) for name in names), dtype=torch.float32)
    trainer.load_state_dict({"updates": int(updates), "optimizer": {"state": state} if state else None})


def _refuse_others(regions_of: list[list[Region]], shapes: dict[str, tuple[int, ...]]) -> None:
    trained = {region.name: region.shape for regions in regions_of for region in regions}
    known = {
        name.removesuffix(f".{_MOMENTS[0]}"): shape for name, shape in shapes.items() if name.endswith(_MOMENTS[0])
    }
    if not known:
        return  # from before the first update
    for name, shape in trained.items():
        if known.get(name, shape) != shape:
            raise OtherOptimizer(f"its `{name}` is {_size(known[name])}, and the model's is {_size(shape)}")
    missing = sorted(trained.keys() - known.keys())
    if len(missing) == len(trained):
        raise OtherOptimizer(f"it has no state of `{missing[0]}`, nor of any other weight that is trained")


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"


def _scalar(tensor: torch.Tensor) -> Pieces:
    return Pieces((1,), [Piece((0,), tensor)])
