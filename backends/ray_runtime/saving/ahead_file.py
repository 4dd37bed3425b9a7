"""An `AheadPart` as one safetensors file: numbers as tensors, everything else as JSON in its header. Nothing in it is
code, so that reading one from somebody else does no harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlflow.backends.ray_runtime.batch import Column, Packed
from rlflow.backends.ray_runtime.saving.ahead import AheadPart, Columns, Key
from rlflow.protocol.samples import Segment

FOLDER = "ahead"


def ahead_path(folder: Path, pool: str, rank: int) -> Path:
    """Where the samples of a rank lie in a checkpoint."""
    return folder / FOLDER / f"{pool}-{rank}.safetensors"


def write_ahead(part: AheadPart, path: Path) -> None:
    """Write the samples; the other state goes elsewhere. TypeError for a column of things that are not plain."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    index: list[dict[str, Any]] = []
    for (step, stage), calls in part.calls.items():
        for number, columns in enumerate(calls):
            name = f"{step}/{stage}/{number}/"
            kinds = {column: _encode(value, name + column, tensors) for column, value in columns.items()}
            index.append({"step": step, "stage": stage, "columns": kinds})
    save_file(tensors, path, metadata={"step": str(part.step), "calls": json.dumps(index)})


def read_ahead(path: Path) -> AheadPart:
    """What `write_ahead` wrote, without the other state. Raises what safetensors and json raise for a broken file."""
    calls: dict[Key, list[Columns]] = {}
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        for entry in json.loads(metadata["calls"]):
            found = calls.setdefault((entry["step"], entry["stage"]), [])
            name = f"{entry['step']}/{entry['stage']}/{len(found)}/"
            found.append({c: _decode(kind, name + c, file.get_tensor) for c, kind in entry["columns"].items()})
    return AheadPart(int(metadata["step"]), {}, calls)


def _encode(column: Column, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    if isinstance(column, Packed):
        # Copies: columns of one call share their offsets, which safetensors refuses.
        tensors[name], tensors[name + "/offsets"] = column.values.clone(), column.offsets.clone()
        return {"kind": "packed"}
    if isinstance(column, np.ndarray):
        tensors[name] = torch.from_numpy(np.array(column))
        return {"kind": "array"}
    if all(isinstance(row, tuple) and all(isinstance(part, Segment) for part in row) for row in column):
        return {"kind": "segments", "rows": [[[part.version, part.tokens] for part in row] for row in column]}
    return {"kind": "list", "rows": column}


def _decode(entry: dict[str, Any], name: str, tensor: Callable[[str], torch.Tensor]) -> Column:
    if entry["kind"] == "packed":
        return Packed(tensor(name), tensor(name + "/offsets"))
    if entry["kind"] == "array":
        return np.asarray(tensor(name).numpy())
    if entry["kind"] == "segments":
        return [tuple(Segment(version, tokens) for version, tokens in row) for row in entry["rows"]]
    rows: list[Any] = entry["rows"]
    return rows
