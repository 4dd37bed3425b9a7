"""Activation checkpointing: what the backward pass computes again instead of keeping it."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(decoder: Any, what: Literal["none", "selective", "full"]) -> None:
    """In place. `selective`: the attention of every layer (Korthikanti et al. 2022, arXiv 2205.05198, recompute the
    scores only; here the projections go with them); `full`: every layer, whose input alone is kept."""
    if what == "none":
        return
    for layer in decoder.layers:
        if not hasattr(layer, "self_attn"):
            continue  # another pipeline stage's
        module: nn.Module = layer if what == "full" else layer.self_attn
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
