"""Which layers of a decoder a pipeline rank keeps, as one decoder for each of its virtual stages."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from rlflow.backends.ray_runtime.parallel.mesh import Mesh


class Absent(nn.Module):  # type: ignore[misc]
    """In the place of a layer that another rank has: layers keep their numbers."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


def keep_own_layers(model: Any, mesh: Mesh) -> list[tuple[int, Any]]:
    """Drop in place what is not this rank's; returns its virtual stages in order: (number, decoder).

    A tied head gets a weight of its own on the last rank. The decoders share their modules with the model's own one,
    which has the layers of all of them.
    """
    layout = mesh.layout
    decoder = model.get_decoder()
    layers = list(decoder.layers)
    stages = layout.pp * layout.vp
    ends = _ends(layout.split or (len(layers) // stages,) * stages)
    numbers = range(mesh.pp_rank, stages, layout.pp)
    if mesh.last_stage and hasattr(model, "lm_head"):
        weight = model.lm_head.weight
        model.lm_head.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    if not mesh.first_stage:
        decoder.embed_tokens = Absent()
    if not mesh.last_stage:
        decoder.norm = nn.Identity()
        for head in ("lm_head", "head"):
            if isinstance(getattr(model, head, None), nn.Module):
                setattr(model, head, nn.Identity())
    mine = {layer for number in numbers for layer in range(*ends[number])}
    decoder.layers = nn.ModuleList(layer if i in mine else Absent() for i, layer in enumerate(layers))
    return [(number, _part(decoder, ends[number], number == stages - 1)) for number in numbers]


def _part(decoder: Any, bounds: tuple[int, int], last: bool) -> Any:
    part = copy.copy(decoder)
    part._modules = dict(decoder._modules)
    inside = range(*bounds)
    part.layers = nn.ModuleList(layer if i in inside else Absent() for i, layer in enumerate(decoder.layers))
    if not last:
        part.norm = nn.Identity()
    return part


def _ends(parts: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(sum(parts[:i]), sum(parts[: i + 1])) for i in range(len(parts))]
