"""Weights of a model that lies in parts on the ranks of a pool, to and from a Hugging Face folder.

The folder is the one that a whole model gives, so that a run may go on under another layout, and people may take it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlflow.backends.ray_runtime.heads import VALUE_HEAD, ValueHeadModel
from rlflow.backends.ray_runtime.local_weights import renew
from rlflow.backends.ray_runtime.models import save_configs, write_weights
from rlflow.backends.ray_runtime.parallel.build import is_whole
from rlflow.backends.ray_runtime.state import ModelState

_BODY, _HEAD = "body.", "head."
"""How a value model names the parameters of its two parts."""


def is_sharded(model: ModelState) -> bool:
    """Whether ranks hold different parts of what is trained."""
    return model.mesh is not None and not is_whole(model.mesh)


def whole_tensors(model: ModelState) -> dict[str, torch.Tensor]:
    """All ranks of the pool call; the first gets a copy of the weights on the host. One tensor travels at a time."""
    assert model.trainer is not None
    return {name: tensor for name, tensor in model.trainer.full_tensors() if tensor is not None}


def write_whole(found: dict[str, torch.Tensor], model: ModelState, tokenizer: Any, folder: Path) -> None:
    """Write what `whole_tensors` gave, on the rank that got it."""
    folder.mkdir(parents=True, exist_ok=True)
    loaded = model.loaded
    tokenizer.save_pretrained(folder)
    if isinstance(loaded.model, ValueHeadModel):
        model.config.save_pretrained(folder)
        save_file(_part(found, _HEAD), folder / VALUE_HEAD)
        found = _part(found, _BODY)
    else:
        save_configs(loaded.model, loaded, folder)
    write_weights(found, folder)


def load_sharded(model: ModelState, folder: Path) -> None:
    """Every rank reads the folder and keeps its part."""
    assert model.trainer is not None
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name != VALUE_HEAD:
            found |= load_file(path)
    if isinstance(model.loaded.model, ValueHeadModel):
        found = {_BODY + name: tensor for name, tensor in found.items()}
        found |= {_HEAD + name: tensor for name, tensor in load_file(folder / VALUE_HEAD).items()}
    model.trainer.load_full(found)


def load_engine(model: ModelState, folder: Path, version: int) -> None:
    """The weights of an engine that has a copy of its own, on a pool that does not train them or in another layout."""
    assert model.engine is not None
    tensors = model.engine.local_tensors()
    model.engine.begin_update(version)
    renew(tensors, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), model.engine_mesh)
    model.engine.update(tensors)
    model.engine.end_update()


def _part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): t.contiguous() for name, t in tensors.items() if name.startswith(prefix)}
