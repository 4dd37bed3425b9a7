"""A model as it is at one moment, in host memory: what a thread writes while training changes the model."""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from rlflow.backends.ray_runtime.devices.swap import host_copy
from rlflow.backends.ray_runtime.models import LoadedModel

_tokenizers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def host_twin(loaded: LoadedModel) -> LoadedModel:
    """The same modules over copies of all weights that are trained. Frozen ones are shared: they never change."""
    modules: list[Any] = [loaded.model] if loaded.critic is None else [loaded.model, loaded.critic]
    if loaded.adapters is not None:
        loaded.adapters.base_digest()  # reads the frozen weights once, here where they are at home
        modules.append(loaded.adapters.base)
    memo: dict[int, Any] = {}
    for module in modules:
        for parameter in module.parameters():
            if id(parameter) not in memo:
                kept = nn.Parameter(host_copy(parameter), True) if parameter.requires_grad else parameter
                memo[id(parameter)] = kept
        for buffer in module.buffers():
            memo.setdefault(id(buffer), buffer)
    memo[id(loaded.tokenizer)] = own_tokenizer(loaded)
    return copy.deepcopy(loaded, memo)


def own_tokenizer(loaded: LoadedModel) -> Any:
    """A tokenizer for another thread: transformers' fast ones cannot be changed in one while another reads them."""
    tokenizer = loaded.tokenizer
    if tokenizer not in _tokenizers:
        _tokenizers[tokenizer] = copy.deepcopy(tokenizer)
    return _tokenizers[tokenizer]
