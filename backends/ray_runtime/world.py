"""The ranks of a run: every pool's, and their numbers in one process group over all pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlflow.backends.ray_runtime.parallel.mesh import Mesh, make_mesh, new_group
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.flow import Layout
from rlflow.plan import Layout as PlanLayout


@dataclass
class World:
    """One rank's view of all of them."""

    pool: str
    rank: int
    """In the pool."""
    pools: Mapping[str, int]
    """Ranks of every pool that executes instructions, in the order of the plan."""
    timeout: timedelta = timedelta(minutes=30)
    """Of every wait for another rank."""
    group: dist.ProcessGroup | None = None
    """Of the pool; None for a pool of one rank."""
    queues: Mapping[str, Any] = field(default_factory=dict)
    """The actors of every queue between pools, by the queue's id."""
    edges: Mapping[str, Any] = field(default_factory=dict)
    """Actors that admit samples one group at a time, by the stage that samples."""
    control: Any = None
    """Actor of what the pools agree on; None for a plan of one pool."""
    _meshes: dict[tuple[Layout, tuple[int, ...]], Mesh] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"rank {self.rank} of pool `{self.pool}`"

    @property
    def size(self) -> int:
        """Ranks of this pool."""
        return self.pools[self.pool]

    @property
    def total(self) -> int:
        """Ranks of all pools."""
        return sum(self.pools.values())

    @property
    def number(self) -> int:
        """This rank among all."""
        return self.ranks(self.pool)[self.rank]

    def ranks(self, pool: str) -> tuple[int, ...]:
        """The numbers of a pool's ranks among all, in pool order."""
        first = 0
        for name, count in self.pools.items():
            if name == pool:
                return tuple(range(first, first + count))
            first += count
        raise KeyError(pool)

    def name_of(self, number: int) -> str:
        """What messages call the rank of this number among all."""
        pool = next(pool for pool in self.pools if number in self.ranks(pool))
        return f"rank {number - self.ranks(pool)[0]} of pool `{pool}`"

    def join(self, address: str, backend: str = "gloo") -> None:
        """Connect with the ranks of all pools; `address` is host:port of the first of all."""
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}",
            rank=self.number,
            world_size=self.total,
            timeout=self.timeout,
        )
        if self.size == self.total:
            self.group = dist.group.WORLD
        elif self.size > 1:
            self.group = new_group(self.ranks(self.pool), "pool", self.timeout)

    def mesh(self, layout: PlanLayout, mapping: tuple[int, ...] = (), stage: str = "") -> Mesh | None:
        """The mesh of a stage of this pool. All ranks of the pool call in the same order. None where every rank works
        on rows of its own with a whole model. `mapping`: the pool's rank of every rank of the layout."""
        found = Layout(**layout.model_dump())
        ranks = self.ranks(self.pool)
        if found.dp == found.size and not found.zero and found.ep == 1 and found.recompute == "none":
            return None
        if found.size != len(ranks):
            raise RunFailure(
                "RLF4003",
                f"the layout has {found.size} ranks and pool `{self.pool}` {len(ranks)}: this version needs as many",
                stage=stage,
            )
        if mapping:
            ranks = tuple(ranks[place] for place in mapping)
        key = (found, ranks)
        if key not in self._meshes:
            self._meshes[key] = make_mesh(found, ranks, timeout=self.timeout)
        return self._meshes[key]

    def between(self, ranks: tuple[int, ...], purpose: str) -> dist.ProcessGroup:
        """A group for one purpose; all its ranks call in the same order."""
        return new_group(ranks, purpose, self.timeout)

    def leave(self) -> None:
        """Close all groups."""
        if dist.is_initialized():
            dist.destroy_process_group()
