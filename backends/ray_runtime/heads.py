"""Models that give one number instead of a distribution over tokens: value models (critics) and reward models.

A value model is saved as the Hugging Face folder of its body (AutoModel loads it) with `value_head.safetensors`
beside it: `weight` float32 [1, hidden], `bias` float32 [1]; value = hidden @ weight + bias.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel

VALUE_HEAD: Final = "value_head.safetensors"


class ValueHeadModel(nn.Module):  # type: ignore[misc]
    """A transformer body and a linear head to one number per position."""

    def __init__(self, body: Any, weight: torch.Tensor | None = None) -> None:
        """`weight` float [1, hidden] starts the head; without one it is zero, so that the first values are 0."""
        super().__init__()
        self.body = body
        self.head = nn.Linear(body.config.hidden_size, 1)
        nn.init.zeros_(self.head.bias)
        if weight is None:
            nn.init.zeros_(self.head.weight)
        else:
            with torch.no_grad():
                self.head.weight.copy_(weight)

    @property
    def config(self) -> Any:
        return self.body.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def get_decoder(self) -> Any:
        return self.body

    def value(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> float32 [...]. Always in fp32: returns differ by less than bf16 resolves."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.float())[..., 0]


def value_model_of(model: Any) -> ValueHeadModel:
    """A trainable value model that starts from a copy of a model's first weights.

    The head is zero, except for a reward model's copy, which starts with that model's own head.
    """
    if isinstance(model, ValueHeadModel):
        return copy.deepcopy(model).requires_grad_(True)  # type: ignore[no-any-return]
    body = copy.deepcopy(getattr(model, model.base_model_prefix)).requires_grad_(True)
    head = getattr(model, "score", None)
    return ValueHeadModel(body, None if head is None else head.weight.detach()).eval()  # type: ignore[no-any-return]


def value_head_on(model: Any) -> ValueHeadModel:
    """A value model whose body is that of `model` itself: the head is zero, and all else are the very same tensors."""
    return ValueHeadModel(getattr(model, model.base_model_prefix)).eval()  # type: ignore[no-any-return]


def save_value_model(model: ValueHeadModel, folder: Path) -> None:
    """Write body and head into `folder`; see the module's text."""
    model.body.config.architectures = [type(model.body).__name__]
    model.body.config.save_pretrained(folder)
    save_torch_state_dict(model.body.state_dict(), folder, filename_pattern="model{suffix}.safetensors")
    save_head(model, folder)


def save_head(model: ValueHeadModel, folder: Path) -> None:
    """Write the head alone."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.head.state_dict().items()}
    save_file(tensors, folder / VALUE_HEAD)


def load_value_weights(model: ValueHeadModel, folder: Path) -> None:
    """Overwrite the model's weights with those that `save_value_model` wrote."""
    saved = AutoModel.from_pretrained(folder, dtype=torch.float32)
    model.body.load_state_dict(saved.state_dict())
    load_head(model, folder)


def load_head(model: ValueHeadModel, folder: Path) -> None:
    """Overwrite the head alone."""
    model.head.load_state_dict(load_file(folder / VALUE_HEAD))


def score_is_linear(model: Any) -> bool:
    """Whether a reward model's output is `score` of the last hidden state at the last token, tried on two tokens."""
    pad = model.config.pad_token_id
    ids = torch.tensor([[token for token in range(3) if token != pad][:2]])
    try:
        with torch.no_grad():
            body = getattr(model, model.base_model_prefix)
            hidden = body(input_ids=ids, use_cache=False).last_hidden_state[:, -1]
            return bool(torch.allclose(model.score(hidden), model(input_ids=ids).logits, atol=1e-4))
    except (AttributeError, TypeError):
        return False
