"""What the workers of tests/unit/ray_runtime/parallel run. Every function is called on all ranks of a layout."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime.parallel.mesh import Mesh, make_mesh
from rlflow.ir.flow import Layout
from tests.unit.ray_runtime.parallel.workers import DEADLINE

AXES = ("tp", "pp", "dp", "cp", "replica", "ep", "etp", "experts", "expert_dp", "stage", "ends", "world")


def mesh_members(layout: Layout, ranks: tuple[int, ...]) -> dict[str, list[int]]:
    """Per axis the places in the layout of the members of this rank's group, found by talking to them."""
    mesh = make_mesh(layout, ranks, timeout=DEADLINE)
    found = {}
    for axis in AXES:
        group = getattr(mesh, axis)
        if group is None:
            continue
        places = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        dist.all_gather(places, torch.tensor([mesh.rank]), group=group)
        found[axis] = [int(place) for place in places]
    return found


def unlike_pasts(layout: Layout) -> int:
    """A mesh over all ranks, of which some have made groups of their own before: the sum of all ranks."""
    if dist.get_rank() < 2:
        make_mesh(Layout(tp=2), (1, 0), timeout=DEADLINE)
    mesh: Mesh = make_mesh(layout, range(layout.size), timeout=DEADLINE)
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=mesh.world)
    return int(total)
