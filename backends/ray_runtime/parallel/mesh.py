"""Where this process stands in a layout, and its process group along every axis.

Rank order is that of `rlflow.reshard.shards`: rank = ((p x dp + d) x cp + c) x tp + t. The experts lie on the ranks of
a pipeline stage in an order of their own: local rank = (x x ep + e) x etp + y, x over the replicas of the experts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from rlflow.ir.flow import Layout

_made: Counter[tuple[str, tuple[int, ...]]] = Counter()


@dataclass(frozen=True)
class Place:
    """Coordinates of one rank of a layout."""

    pp: int
    dp: int
    cp: int
    tp: int
    expert_replica: int
    ep: int
    etp: int

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Place:
        above, t = divmod(rank, layout.tp)
        above, c = divmod(above, layout.cp)
        p, d = divmod(above, layout.dp)
        local = rank % (layout.dp * layout.cp * layout.tp)
        above, y = divmod(local, layout.etp)
        x, e = divmod(above, layout.ep)
        return cls(p, d, c, t, x, e, y)


@dataclass(eq=False)
class Mesh:
    """The ranks of one model's layout as this process sees them. A group is None where it would have one member."""

    layout: Layout
    ranks: tuple[int, ...]
    """Ranks of torch.distributed's default group, in the layout's order: layout.size of them."""
    rank: int
    """This process's place in `ranks`."""
    place: Place
    timeout: timedelta
    """Of every collective."""
    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None
    """Data parallelism: same pipeline stage, same tensor-parallel part."""
    cp: dist.ProcessGroup | None = None
    replica: dist.ProcessGroup | None = None
    """All ranks of one replica, which all need the same rows."""
    ep: dist.ProcessGroup | None = None
    etp: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None
    """The ep x etp ranks that hold every expert once."""
    expert_dp: dist.ProcessGroup | None = None
    """The holders of the same part of the same experts in a pipeline stage."""
    stage: dist.ProcessGroup | None = None
    """All ranks of a pipeline stage."""
    ends: dist.ProcessGroup | None = None
    """First and last pipeline stage: a tied embedding is on both. The stages between are in a group of their own."""
    world: dist.ProcessGroup | None = None
    """All ranks of the layout."""
    _device_mesh: DeviceMesh | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def pp_rank(self) -> int:
        return self.place.pp

    @property
    def dp_rank(self) -> int:
        return self.place.dp

    @property
    def cp_rank(self) -> int:
        return self.place.cp

    @property
    def tp_rank(self) -> int:
        return self.place.tp

    @property
    def ep_rank(self) -> int:
        return self.place.ep

    @property
    def etp_rank(self) -> int:
        return self.place.etp

    @property
    def first_stage(self) -> bool:
        return self.place.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.place.pp == self.layout.pp - 1

    def members(self, same: Callable[[Place], object]) -> tuple[int, ...]:
        """Default-group ranks of those for whom `same` says what it says of this process, in the layout's order."""
        mine = same(self.place)
        return tuple(r for i, r in enumerate(self.ranks) if same(Place.of(self.layout, i)) == mine)

    def device_mesh(self, device: str) -> DeviceMesh:
        """Axes of more than one rank among `dp` and `tp` of this pipeline stage, as torch's modules want them.

        Made of this mesh's own groups, so that it costs no communication. Both axes missing: ValueError.
        """
        if self._device_mesh is None:
            axes = [(name, group) for name, group in (("dp", self.dp), ("tp", self.tp)) if group is not None]
            if not axes:
                raise ValueError("a stage of one rank has no device mesh")
            stage = self.members(lambda place: (place.pp, place.cp))
            shape = [group.size() for _, group in axes]
            self._device_mesh = DeviceMesh.from_group(
                [group for _, group in axes] if len(axes) > 1 else axes[0][1],
                device,
                torch.tensor(stage).reshape(shape),
                mesh_dim_names=tuple(name for name, _ in axes),
            )
        return self._device_mesh


_AXES: tuple[tuple[str, Callable[[Place, Layout], object]], ...] = (
    ("tp", lambda p, _: (p.pp, p.dp, p.cp)),
    ("pp", lambda p, _: (p.dp, p.cp, p.tp)),
    ("dp", lambda p, _: (p.pp, p.cp, p.tp)),
    ("cp", lambda p, _: (p.pp, p.dp, p.tp)),
    ("replica", lambda p, _: p.dp),
    ("ep", lambda p, _: (p.pp, p.expert_replica, p.etp)),
    ("etp", lambda p, _: (p.pp, p.expert_replica, p.ep)),
    ("experts", lambda p, _: (p.pp, p.expert_replica)),
    ("expert_dp", lambda p, _: (p.pp, p.ep, p.etp)),
    ("stage", lambda p, _: p.pp),
    ("ends", lambda p, layout: (p.pp in (0, layout.pp - 1), p.dp, p.cp, p.tp)),
    ("world", lambda p, _: None),
)
"""Every group and what its members have in common."""


def make_mesh(layout: Layout, ranks: Sequence[int], *, timeout: timedelta) -> Mesh:
    """The mesh of a model whose layout lies on `ranks`. Every process of `ranks` calls, and no other.

    Processes that are in several meshes make them in the same order. ValueError when the layout has another number of
    ranks, or this process is none of them; then no group was made.
    """
    ranks = tuple(ranks)
    if len(ranks) != layout.size:
        raise ValueError(f"the layout has {layout.size} ranks, {len(ranks)} were given")
    if layout.dp * layout.cp * layout.tp % (layout.ep * layout.etp):
        raise ValueError(f"ep {layout.ep} x etp {layout.etp} does not divide the ranks of a pipeline stage")
    me = dist.get_rank() if len(ranks) > 1 else ranks[0]
    if me not in ranks:
        raise ValueError(f"rank {me} is none of {list(ranks)}")
    rank = ranks.index(me)
    mesh = Mesh(layout, ranks, rank, Place.of(layout, rank), timeout)
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for name, same in _AXES:
        if name == "ends" and layout.pp == 1:
            continue
        members = mesh.members(lambda place, same=same: same(place, layout))  # type: ignore[misc]
        if len(members) == 1:
            continue
        if members not in made:
            made[members] = new_group(members, name, timeout)
        setattr(mesh, name, made[members])
    return mesh


def new_group(ranks: Sequence[int], purpose: str, timeout: timedelta) -> dist.ProcessGroup:
    """A process group that only its members make, in the order of `ranks`.

    torch names such a group after the number of groups that a process has, so members with different pasts would wait
    for each other for ever. Here the name says the ranks, the purpose, and how many such groups there were before,
    which all members agree on.
    """
    ranks = tuple(ranks)
    count = _made[purpose, ranks]
    _made[purpose, ranks] += 1
    name = hashlib.sha1(f"rlflow {purpose} {ranks} {count}".encode(), usedforsecurity=False).hexdigest()
    with mock.patch.object(distributed_c10d, "_process_group_name", return_value=name):
        return dist.new_group(
            list(ranks), timeout=timeout, use_local_synchronization=True, sort_ranks=False, group_desc=purpose
        )
