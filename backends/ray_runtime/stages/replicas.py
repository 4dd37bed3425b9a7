"""Model-parallel replicas: ranks that run one model together need the same rows.

Between stages every rank of a pool holds rows of its own. Around a stage whose model is cut over several ranks those of
a replica put their rows together, in the order of the pool's ranks, run the stage on all of them, and keep the results
of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from rlflow.backends.ray_runtime.batch import Batch, Packed, Share
from rlflow.backends.ray_runtime.parallel.mesh import Mesh
from rlflow.diagnostics.diagnostic import RunFailure


@dataclass(frozen=True)
class Together:
    """The rows of a replica, and which of them are this rank's."""

    parts: tuple[Any, ...]
    """What every rank gave, in the order of the pool's ranks."""
    place: int
    """This rank's place among them."""

    def rows(self, index: int = 0) -> Batch:
        """The batches that ranks gave as number `index`, as one."""
        batches = [part[index] for part in self.parts]
        return batches[0] if len(batches) == 1 else whole(batches)

    def column(self, index: int) -> Any:
        """The columns that ranks gave as number `index`, as one; None where they gave none."""
        columns = [part[index] for part in self.parts]
        if columns[0] is None or len(columns) == 1:
            return columns[0]
        return Packed.concat(columns) if isinstance(columns[0], Packed) else np.concatenate(columns)

    def own(self, column: Packed | np.ndarray, counts: list[int]) -> Packed | np.ndarray:
        """This rank's rows of a result over all rows; `counts`: rows of every rank."""
        if len(self.parts) == 1:
            return column
        first = sum(counts[: self.place])
        last = first + counts[self.place]
        if isinstance(column, np.ndarray):
            return column[first:last]
        low, high = int(column.offsets[first]), int(column.offsets[last])
        return Packed(column.values[low:high].clone(), column.offsets[first : last + 1] - low)


def together(mesh: Mesh | None, *given: Any) -> Together:
    """Everything that the ranks of this rank's replica give. All of them must call."""
    if mesh is None or mesh.replica is None:
        return Together((given,), 0)
    members = mesh.members(lambda place: place.dp)
    parts: list[Any] = [None] * len(members)
    dist.all_gather_object(parts, given, group=mesh.replica)
    order = sorted(range(len(members)), key=lambda i: members[i])
    place = order.index(members.index(mesh.ranks[mesh.rank]))
    return Together(tuple(parts[i] for i in order), place)


def whole(batches: list[Batch]) -> Batch:
    """The rows of consecutive ranks as those of one. Groups that ranks number for themselves are numbered on."""
    shares = [batch.share for batch in batches]
    if all(share is None for share in shares):
        first, parts = 0, []
        for batch in batches:
            if "group" in batch.columns:
                groups = batch.array("group")
                batch = batch.with_columns(group=groups + first)
                first += int(groups.max()) + 1 if len(groups) else 0
            parts.append(batch)
        return Batch.concat(parts)
    share = _merged([share for share in shares if share is not None])
    if "group" in batches[0].columns:
        joined = Batch.concat(batches)
        return Batch(joined.rows, joined.columns, share)
    # Prompts that two ranks have samples of are on both.
    found, seen = [], 0
    for batch, own in zip(batches, shares, strict=True):
        assert own is not None
        new = [place for place, number in enumerate(own.touched) if number >= seen]
        seen = max(seen, own.touched.stop)
        found.append(batch.select(new))
    joined = Batch.concat(found)
    return Batch(joined.rows, joined.columns, share)


def _merged(shares: list[Share]) -> Share:
    """The share of consecutive ranks together, where so many divide all ranks."""
    first, count = shares[0], len(shares)
    consecutive = [share.rank for share in shares] == list(range(first.rank, first.rank + count))
    if not consecutive or first.rank % count or first.ranks % count:
        raise RunFailure(
            "RLF4003",
            f"{first.prompts} prompts do not divide over {first.ranks} ranks, of which {count} that are not neighbours "
            "run one model",
            help=(f"take {-(-first.prompts // first.ranks) * first.ranks} prompts",),
        )
    return Share(first.prompts, first.rank // count, first.ranks // count)
