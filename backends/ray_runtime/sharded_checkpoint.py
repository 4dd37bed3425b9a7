"""Weights of a model that lies in parts on the ranks of a pool, to and from a Hugging Face folder.

The folder is the one that a whole model gives, so that a run may go on under another layout, and people may take it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlflow.backends.ray_runtime.adapters import check_shapes, parameter_name, read_adapters
from rlflow.backends.ray_runtime.devices.swap import host_copy
from rlflow.backends.ray_runtime.heads import VALUE_HEAD, ValueHeadModel, load_head
from rlflow.backends.ray_runtime.local_weights import renew
from rlflow.backends.ray_runtime.models import save_configs, write_weights
from rlflow.backends.ray_runtime.parallel.build import is_whole
from rlflow.backends.ray_runtime.state import ModelState

_BODY, _HEAD = "body.", "head."
"""How a value model names the parameters of its two parts."""
_CRITIC = "critic.head."
"""Before the parameters of a value head on a policy's own body."""


def is_sharded(model: ModelState) -> bool:
    """Whether ranks hold different parts of what is trained."""
    return model.mesh is not None and not is_whole(model.mesh)


def whole_tensors(model: ModelState, merged: bool = False) -> dict[str, torch.Tensor]:
    """All ranks of the pool call; the first gets a copy of the weights on the host. One tensor travels at a time.

    Of a model with adapters these alone, unless `merged`: then the frozen weights too.
    """
    assert model.trainer is not None
    if model.loaded.adapters is not None:
        model.loaded.adapters.base_digest()  # reads the frozen weights once, here where they are at home
    found = {name: tensor for name, tensor in model.trainer.full_tensors(frozen=merged) if tensor is not None}
    if model.loaded.critic is not None:  # every rank has its head whole
        head = model.loaded.critic.head.state_dict()
        found |= {_CRITIC + name: host_copy(tensor) for name, tensor in head.items()}
    return found


def write_whole(
    found: dict[str, torch.Tensor], model: ModelState, tokenizer: Any, folder: Path, merged: bool = False
) -> None:
    """Write what `whole_tensors` gave, on the rank that got it."""
    folder.mkdir(parents=True, exist_ok=True)
    loaded = model.loaded
    tokenizer.save_pretrained(folder)
    if loaded.critic is not None:
        save_file(_part(found, _CRITIC), folder / VALUE_HEAD)
        found = {name: tensor for name, tensor in found.items() if not name.startswith(_CRITIC)}
    if isinstance(loaded.model, ValueHeadModel):
        model.config.save_pretrained(folder)
        save_file(_part(found, _HEAD), folder / VALUE_HEAD)
        found = _part(found, _BODY)
    else:
        if loaded.adapters is not None:
            adapters = {name: found[parameter_name(name)] for name in loaded.adapters.shapes}
            loaded.adapters.save(folder, adapters)
            if not merged:
                return
            found = loaded.adapters.merged_tensors(found)
        save_configs(loaded.model, loaded, folder)
    write_weights(found, folder)


def load_sharded(model: ModelState, folder: Path) -> None:
    """Every rank reads the folder and keeps its part."""
    assert model.trainer is not None
    if model.loaded.critic is not None:
        load_head(model.loaded.critic, folder)
    adapters = model.loaded.adapters
    if adapters is not None:
        adapters.check_base(folder)
        saved = read_adapters(folder)
        check_shapes(folder, saved, adapters.shapes)
        model.trainer.load_full({parameter_name(name): tensor for name, tensor in saved.items()})
        return
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
    if model.check is not None:
        model.engine.load_adapters(folder, version)
        return
    tensors = model.engine.local_tensors()
    model.engine.begin_update(version)
    renew(tensors, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), model.engine_mesh)
    model.engine.update(tensors)
    model.engine.end_update()


def _part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): t.contiguous() for name, t in tensors.items() if name.startswith(prefix)}
