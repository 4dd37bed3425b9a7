"""Tensor parallelism of a Llama-like decoder, by torch's own parallel styles where they have a style for it.

Attention is cut by head, the feed-forward part by its inner columns, embedding and head by rows of the vocabulary
(Shoeybi et al. 2019, arXiv 1909.08053). Between the parts activations are plain tensors, equal on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from rlflow.backends.ray_runtime.parallel.adapters import plain_input, with_adapters
from rlflow.backends.ray_runtime.parallel.collectives import join_rows, split_rows
from rlflow.backends.ray_runtime.parallel.mesh import Mesh
from rlflow.backends.ray_runtime.parallel.vocabulary import VocabularyHead, padded_rows


class KvCopies(ParallelStyle):  # type: ignore[misc]
    """Key or value projection with fewer heads than ranks: consecutive ranks hold one head together, each as a copy.

    Every copy's gradient is that of its own query heads; who reduces gradients sums them over the copies.
    """

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        copies = device_mesh.size() // self.heads
        head = device_mesh.get_local_rank() // copies
        for name, parameter in list(module.named_parameters()):
            part = parameter.detach().chunk(self.heads)[head].clone()
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        module.register_forward_pre_hook(plain_input)
        return module


def shard_decoder(decoder: Any, mesh: Mesh, device_mesh: DeviceMesh) -> None:
    """Cut the layers of a decoder in place. `device_mesh`: one axis, the tensor-parallel ranks.

    With `layout.sp` what lies between the parts is cut by position (Korthikanti et al. 2022, arXiv 2205.05198): see
    `cut_positions`, which makes it so.
    """
    tp = device_mesh.size()
    between: Placement = Shard(1) if mesh.layout.sp else Replicate()
    config = decoder.config
    kv_heads = int(config.num_key_value_heads)
    for layer in decoder.layers:
        if not hasattr(layer, "self_attn"):
            continue  # another pipeline stage's
        kv: ParallelStyle = ColwiseParallel() if kv_heads % tp == 0 else KvCopies(kv_heads)
        plan: dict[str, ParallelStyle] = {
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": between},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": kv,
            "self_attn.v_proj": kv,
            "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        }
        if hasattr(layer.mlp, "gate_proj"):
            plan |= {
                "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=between),
            }
        assert mesh.tp is not None
        plan = with_adapters(layer, plan, mesh.tp, kv_heads)
        parallelize_module(layer, device_mesh, plan, src_data_rank=None)
        heads = int(config.num_attention_heads) // tp
        layer.self_attn.num_key_value_groups = heads // max(1, kv_heads // tp)


def cut_positions(decoder: Any, group: dist.ProcessGroup) -> None:
    """Between the first layer that a decoder has and its last one every rank has its part of the positions.

    The number of positions must be a multiple of the ranks.
    """
    layers = [layer for layer in decoder.layers if hasattr(layer, "self_attn")]
    if layers:
        layers[0].register_forward_pre_hook(lambda _, inputs: (_own_positions(inputs[0], group), *inputs[1:]))
        layers[-1].register_forward_hook(lambda _, __, output: _all_positions(output, group))


def _own_positions(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return split_rows(hidden.transpose(0, 1), group).transpose(0, 1).contiguous()


def _all_positions(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    positions = hidden.shape[1] * group.size()
    whole = join_rows(hidden.transpose(0, 1).contiguous(), positions, group).transpose(0, 1)
    return whole.clone(memory_format=torch.contiguous_format)  # never a view, which FSDP's marks would be lost on


def shard_embedding(decoder: Any, device_mesh: DeviceMesh) -> None:
    """Cut the rows of the input embedding, padded, over the ranks of a one-axis mesh."""
    embedding = decoder.embed_tokens
    embedding.weight = _padded(embedding.weight, device_mesh.size())
    embedding.num_embeddings = len(embedding.weight)
    parallelize_module(embedding, device_mesh, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)


def shard_head(model: Any, tied: nn.Parameter | None, device_mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """Put a `VocabularyHead` in the place of `model.lm_head`; `tied`: the embedding's weight that it shares."""
    vocabulary = int(model.config.vocab_size)
    if tied is None:
        head = model.lm_head
        head.weight = _padded(head.weight, device_mesh.size())
        parallelize_module(head, device_mesh, ColwiseParallel(), src_data_rank=None)
        tied = head.weight
    model.lm_head = VocabularyHead(tied, vocabulary, group)


def _padded(weight: nn.Parameter, parts: int) -> nn.Parameter:
    rows = padded_rows(len(weight), parts)
    if rows == len(weight):
        return weight
    padding = torch.zeros(rows - len(weight), *weight.shape[1:], dtype=weight.dtype, device=weight.device)
    return nn.Parameter(torch.cat([weight.detach(), padding]), requires_grad=weight.requires_grad)
