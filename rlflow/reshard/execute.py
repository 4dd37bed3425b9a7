"""Execution of a plan on numpy arrays: the reference for what a runtime must do with real tensors.

It moves box by box, checks that every element of every target shard is written exactly once, and takes digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rlflow.reshard.boxes import Box, extents, relative, slices, volume
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.plan import ReshardPlan, Transfer
from rlflow.reshard.shards import Sharding

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]
    Shards = dict[str, Array]
    """Local tensors of one rank by name."""


def cut(sharding: Sharding, tensors: Mapping[str, Array], rank: int) -> Shards:
    """The local tensors of a rank out of the canonical ones; padding is 0."""
    import numpy as np

    shards: Shards = {}
    for name, local in sharding.local_tensors(rank).items():
        shards[name] = np.zeros(sharding.local_shape(rank, local), tensors[local.parts[0].name].dtype)
    for spec in sharding.catalogue:
        for piece in sharding.pieces(rank, spec.name):
            value = tensors[spec.name][slices(piece.box)]
            local_name = sharding.local(spec.name)[0].name
            shards[local_name][slices(piece.local)] = value.reshape(extents(piece.local))
    return shards


def read(sharding: Sharding, rank: int, shards: Shards, tensor: str, box: Box) -> Array:
    """A box of a canonical tensor out of the shards of a rank. ReshardError if the rank lacks a part."""
    import numpy as np

    array = shards[sharding.local(tensor)[0].name]
    value = np.empty(extents(box), array.dtype)
    found = 0
    for piece in sharding.pieces(rank, tensor):
        for canonical, local in piece.locate(box):
            value[slices(relative(canonical, box))] = array[slices(local)].reshape(extents(canonical))
            found += volume(canonical)
    if found != volume(box):
        raise ReshardError(f"rank {rank} has {found} of {volume(box)} elements of {tensor} {list(box)}")
    return value


def write(sharding: Sharding, rank: int, shards: Shards, tensor: str, box: Box, value: Array) -> None:
    """The inverse of `read`."""
    array = shards[sharding.local(tensor)[0].name]
    written = 0
    for piece in sharding.pieces(rank, tensor):
        for canonical, local in piece.locate(box):
            array[slices(local)] = value[slices(relative(canonical, box))].reshape(extents(local))
            written += volume(canonical)
    if written != volume(box):
        raise ReshardError(f"rank {rank} needs {written} of {volume(box)} elements of {tensor} {list(box)}")


def execute(
    plan: ReshardPlan, source: Mapping[int, Shards], dtype: Any = None, transfers: Iterable[Transfer] | None = None
) -> dict[int, Shards]:
    """Target shards by device, from source shards by device. `dtype`: of the target arrays, None = as the source.

    `transfers`: another order of the plan's transfers and copies. ReshardError if an element is written twice or never,
    or is passed on before it has arrived.
    """
    import numpy as np

    before = Sharding(plan.catalogue, plan.source.layout, plan.source.storage)
    after = Sharding(plan.catalogue, plan.target.layout, plan.target.storage)
    source_rank = {device: rank for rank, device in enumerate(plan.source.devices)}
    target_rank = {device: rank for rank, device in enumerate(plan.target.devices)}
    kind = dtype or next(array.dtype for shards in source.values() for array in shards.values())
    result: dict[int, Shards] = {}
    written: dict[int, Shards] = {}
    for device, rank in target_rank.items():
        shapes = {name: after.local_shape(rank, local) for name, local in after.local_tensors(rank).items()}
        result[device] = {name: np.zeros(shape, kind) for name, shape in shapes.items()}
        written[device] = {name: np.zeros(shape, np.uint8) for name, shape in shapes.items()}
    for transfer in transfers if transfers is not None else (*plan.copies(), *plan.transfers()):
        tensor, box, sender, receiver = transfer.tensor, transfer.box, transfer.source, transfer.target
        if transfer.step:
            if not read(after, target_rank[sender], written[sender], tensor, box).all():
                raise ReshardError(f"device {sender} passes on {tensor} {list(box)} before it has it")
            value = read(after, target_rank[sender], result[sender], tensor, box)
        else:
            value = read(before, source_rank[sender], source[sender], tensor, box).astype(kind)
        rank = target_rank[receiver]
        counts = read(after, rank, written[receiver], tensor, box) + np.uint8(1)
        if (counts > 1).any():
            raise ReshardError(f"device {receiver} gets part of {tensor} {list(box)} twice")
        write(after, rank, written[receiver], tensor, box, counts)
        write(after, rank, result[receiver], tensor, box, value)
    for device, rank in target_rank.items():
        for spec in after.catalogue:
            for piece in after.pieces(rank, spec.name):
                if not read(after, rank, written[device], spec.name, piece.box).all():
                    raise ReshardError(f"device {device} does not get all of {spec.name} {list(piece.box)}")
    return result


def gather(sharding: Sharding, shards: Mapping[int, Shards], tensor: str) -> Array:
    """A canonical tensor out of the shards of all ranks. ReshardError where copies differ or an element is nowhere."""
    import numpy as np

    local_name = sharding.local(tensor)[0].name
    kind = next(found[local_name].dtype for found in shards.values() if local_name in found)
    value = np.zeros(sharding.catalogue[tensor].shape, kind)
    known = np.zeros(value.shape, bool)
    for rank, found in shards.items():
        for piece in sharding.pieces(rank, tensor):
            box = slices(piece.box)
            part = read(sharding, rank, found, tensor, piece.box)
            if not np.array_equal(part[known[box]], value[box][known[box]]):
                raise ReshardError(f"rank {rank} has another {tensor} {list(piece.box)} than ranks before it")
            value[box] = part
            known[box] = True
    if not known.all():
        raise ReshardError(f"{int((~known).sum())} elements of {tensor} are on no rank")
    return value


def digests(sharding: Sharding, shards: Mapping[int, Shards]) -> dict[str, str]:
    """SHA-256 of every canonical tensor (type, shape, row-major bytes) as the ranks hold it together."""
    found = {}
    for spec in sharding.catalogue:
        if sharding.stages(spec):
            found[spec.name] = digest(gather(sharding, shards, spec.name))
    return found


def digest(value: Array) -> str:
    header = f"{value.dtype.str} {value.shape} ".encode()
    return hashlib.sha256(header + value.tobytes()).hexdigest()
