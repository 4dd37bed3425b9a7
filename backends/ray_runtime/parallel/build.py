"""From a model and a mesh to what a trainer works with."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from rlflow.backends.ray_runtime.forward import Compute
from rlflow.backends.ray_runtime.models import LoadedModel
from rlflow.backends.ray_runtime.parallel.adapters import adapter_parameters
from rlflow.backends.ray_runtime.parallel.executor import Executor, Forward
from rlflow.backends.ray_runtime.parallel.mesh import Mesh, make_mesh
from rlflow.backends.ray_runtime.parallel.packed import allow_packed, can_pack
from rlflow.backends.ray_runtime.parallel.pipeline import PipelineExecutor
from rlflow.backends.ray_runtime.parallel.replicas import shard_weights
from rlflow.backends.ray_runtime.parallel.sharded import ShardedModel
from rlflow.backends.ray_runtime.parallel.updates import CRITIC, ShardedUpdates, Updates
from rlflow.ir.flow import Layout


@dataclass
class Parts:
    sharded: ShardedModel
    executor: Executor
    updates: Updates


def build(loaded: LoadedModel, compute: Compute, mesh: Mesh | None) -> Parts:
    """Cut the model over the mesh. Without one, or where the layout leaves the model whole on every rank, nothing is
    changed and an update does what it does in one process."""
    if mesh is None:
        mesh = make_mesh(Layout(), (0,), timeout=timedelta(0))
    sharded = ShardedModel(loaded, mesh)
    forward = Forward(loaded.model, compute, loaded.critic)
    head = [] if loaded.critic is None else list(loaded.critic.head.parameters())
    if sharded.fsdp:
        # Every replica has all of the adapters: they are small, and published from each.
        apart = set() if loaded.adapters is None else adapter_parameters(loaded.model)
        shard_weights(forward, loaded.model.get_decoder(), mesh, {*head, *apart})
        forward.own_outputs = True
        sharded.refresh()
    packs = can_pack(loaded.model.get_decoder())
    if is_whole(mesh):
        leaves = {name: p for name, p in loaded.model.named_parameters() if p.requires_grad}
        leaves |= {f"{CRITIC}.{number}": p for number, p in enumerate(head)}
        return Parts(sharded, Executor(forward, shares=packs), Updates(leaves))
    multiple = mesh.layout.tp if mesh.layout.sp else 1
    if packs:
        allow_packed(loaded.model.get_decoder())
    executor: Executor
    if mesh.layout.pp > 1:
        executor = PipelineExecutor(forward, mesh, sharded.virtual_stages, _together(mesh), multiple, packs)
    else:
        executor = Executor(forward, _together(mesh), multiple, packs)
    return Parts(sharded, executor, ShardedUpdates(sharded, head))


def is_whole(mesh: Mesh) -> bool:
    """Whether every rank has the whole model and all of its optimizer."""
    layout = mesh.layout
    return layout.tp == layout.pp == layout.ep == layout.etp == 1 and (layout.zero == 0 or mesh.dp is None)


def _together(mesh: Mesh) -> dist.ProcessGroup | None:
    """Ranks of different replicas that talk in every forward or backward pass."""
    layout = mesh.layout
    tokens_leave_the_replica = layout.ep * layout.etp > 1 and (layout.ep * layout.etp > layout.tp or layout.pp > 1)
    return mesh.dp if layout.zero >= 2 or tokens_leave_the_replica else None
