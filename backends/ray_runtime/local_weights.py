"""A rank's part of a model's weights: which tensors they are, under which names, and the model that computes with them.

Names, shapes and padding are those of `rlflow.reshard.shards.Sharding` with separate projections and a vocabulary that
is padded to a multiple of tp, so that a planned reshard can read and write them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rlflow.backends.ray_runtime.parallel.mesh import Mesh
from rlflow.backends.ray_runtime.tensor_parallel import (
    LocalExperts,
    RowParallel,
    VocabularyEmbedding,
    VocabularyHead,
)
from rlflow.cluster.presets.architecture import Architecture
from rlflow.cluster.presets.from_config import facts_of_config
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.reshard.boxes import extents, slices
from rlflow.reshard.catalogue import EMBEDDING, HEAD, Catalogue, catalogue
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.names import match_names
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import Storage

_SHARDED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


def catalogue_of(config: PretrainedConfig) -> Catalogue:
    """Every tensor of a model under its canonical name. ReshardError where that is not known of the model."""
    facts = facts_of_config(config.to_dict())
    if facts is None:
        raise ReshardError(f"no sharding rules for the model type {config.model_type}")
    return catalogue(Architecture(str(config.model_type), facts), mtp=False)


def canonical_tensors(model: PreTrainedModel, known: Catalogue) -> dict[str, torch.Tensor]:
    """The tensors of a whole model, live, in the catalogue's order. ReshardError where model and catalogue differ."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for name, sources in match_names(known, shapes).items():
        parameter = model.get_parameter(name).detach()
        for source in sources:
            if source.expert is not None:
                raise ReshardError(f"{name}: the experts of a layer must be one tensor")
            size = parameter.shape[-2] // source.parts if source.parts > 1 else 0
            found[source.tensor] = parameter.narrow(-2, source.part * size, size) if size else parameter
    return {spec.name: found[spec.name] for spec in known}


def whole_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of a model that one rank holds whole; those of an unknown kind under the names they have."""
    try:
        return canonical_tensors(model, catalogue_of(model.config))
    except ReshardError:
        return {name: parameter.detach() for name, parameter in model.named_parameters()}


class LocalWeights:
    """The part of `model` that `mesh` gives this rank: `model`, which computes with it, and `tensors` by name.

    RunFailure RLF4003: a model or a layout that cannot be sampled from in parts.
    """

    def __init__(self, model: PreTrainedModel, mesh: Mesh, dtype: torch.dtype) -> None:
        layout = mesh.layout
        try:
            if type(model).__name__ not in _SHARDED:
                raise ReshardError(f"only {', '.join(_SHARDED)} are cut into parts, this is {type(model).__name__}")
            known = catalogue_of(model.config)
            storage = Storage(vocabulary_multiple=layout.tp, dtype=str(dtype).removeprefix("torch."), mtp=False)
            sharding = Sharding(known, layout, storage)
            whole = canonical_tensors(model, known)
        except ReshardError as error:
            raise RunFailure(
                "RLF4003",
                f"the model cannot be sampled from with tp = {layout.tp}, ep = {layout.ep}",
                notes=error.problems,
                help=("generate with tp = 1",),
            ) from None
        self.tensors = {
            name: cut(sharding, mesh.rank, name, whole, dtype) for name in sharding.local_tensors(mesh.rank)
        }
        self.model = _local_model(model, mesh, self.tensors)

    def take(self, model: PreTrainedModel, mesh: Mesh) -> None:
        """Copy the rank's part of a whole model once more, in place."""
        renew(self.tensors, model, mesh)


def renew(tensors: Mapping[str, torch.Tensor], model: PreTrainedModel, mesh: Mesh | None) -> None:
    """Overwrite a rank's `tensors`, of `LocalWeights` or whole, from a whole model."""
    with torch.no_grad():
        if mesh is None or mesh.tp is None:
            for name, value in whole_tensors(model).items():
                tensors[name].copy_(value)
            return
        known = catalogue_of(model.config)
        sharding = Sharding(known, mesh.layout, Storage(vocabulary_multiple=mesh.layout.tp, mtp=False))
        whole = canonical_tensors(model, known)
        for name, tensor in tensors.items():
            fill(sharding, mesh.rank, name, whole, tensor)


def check_layout(mesh: Mesh) -> None:
    """RLF4003 for a layout whose replicas are not one tensor-parallel group each."""
    layout = mesh.layout
    experts = layout.ep * layout.etp
    problem = ""
    if layout.pp > 1 or layout.cp > 1:
        problem = f"generate cannot run with pp = {layout.pp}, cp = {layout.cp}"
    elif layout.zero == 3:
        problem = "generate cannot run on weights that are sharded over data parallel replicas (zero = 3)"
    elif experts > layout.tp or layout.tp % experts:
        problem = f"generate cannot run with ep {layout.ep} x etp {layout.etp} = {experts} on tp = {layout.tp}"
    if problem:
        raise RunFailure(
            "RLF4003",
            problem,
            notes=("every replica must hold all of the weights in one tensor-parallel group",),
            help=(f"generate with tp = {layout.size // layout.dp}, ep = {min(layout.ep, layout.size // layout.dp)}",),
        )


def cut(
    sharding: Sharding, rank: int, name: str, whole: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """A rank's part of a tensor, in memory of its own; `whole`: by canonical name."""
    local = sharding.local_tensors(rank)[name]
    like = whole[local.parts[0].name]
    part = torch.zeros(sharding.local_shape(rank, local), dtype=dtype, device=like.device)
    fill(sharding, rank, name, whole, part)
    return part


def fill(sharding: Sharding, rank: int, name: str, whole: Mapping[str, torch.Tensor], into: torch.Tensor) -> None:
    """The same into memory that is there."""
    for spec in sharding.local_tensors(rank)[name].parts:
        for piece in sharding.pieces(rank, spec.name):
            value = whole[spec.name][slices(piece.box)]
            into[slices(piece.local)].copy_(value.reshape(extents(piece.local)))


def _local_model(model: PreTrainedModel, mesh: Mesh, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """transformers' own modules for fewer heads and columns, with sums over the group where parts come together."""
    group = mesh.tp
    assert group is not None
    config = copy.deepcopy(model.config)
    tp = mesh.layout.tp
    config.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    config.num_attention_heads //= tp
    config.num_key_value_heads = max(config.num_key_value_heads // tp, 1)
    with torch.device("meta"):
        local: PreTrainedModel = type(model)(config)
    local.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # its frequencies are in no checkpoint
    for name, tensor in tensors.items():
        if name not in (EMBEDDING, HEAD) and ".experts." not in name:
            owner, _, last = name.rpartition(".")
            setattr(local.get_submodule(owner), last, nn.Parameter(tensor, requires_grad=False))
    for index, layer in enumerate(local.model.layers):
        layer.self_attn.o_proj = RowParallel(layer.self_attn.o_proj.weight, group)
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = _local_experts(layer.mlp.experts, f"model.layers.{index}", mesh, tensors)
        else:
            layer.mlp.down_proj = RowParallel(layer.mlp.down_proj.weight, group)
    rows = tensors[EMBEDDING]
    local.model.embed_tokens = VocabularyEmbedding(rows, mesh.tp_rank * len(rows), group)
    head = nn.Parameter(tensors[HEAD], requires_grad=False) if HEAD in tensors else local.model.embed_tokens.weight
    local.lm_head = VocabularyHead(head, int(config.vocab_size), group)
    left = [name for name, parameter in local.named_parameters() if parameter.is_meta]
    assert not left, f"{left} have no weights"
    return local.eval()


def _local_experts(whole: Any, layer: str, mesh: Mesh, tensors: dict[str, torch.Tensor]) -> LocalExperts:
    group = mesh.tp
    assert group is not None
    gate, up, down = (tensors[f"{layer}.mlp.experts.{part}_proj.weight"] for part in ("gate", "up", "down"))
    held = mesh.layout.ep * mesh.layout.etp
    copies, copy_ = mesh.layout.tp // held, mesh.tp_rank // held
    return LocalExperts(gate, up, down, whole.act_fn, mesh.ep_rank * len(gate), copy_, copies, group)
