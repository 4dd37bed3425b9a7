"""Rank mapping: which device gets which rank of the target layout, so that the most is already there.

Maximising the reused elements is an assignment problem (Kuhn 1955; solved by the shortest augmenting paths of
scipy.optimize.linear_sum_assignment). Ranks with equal needs, and devices with equal holdings, are interchangeable, so
blocks of them are assigned: with g the greatest common divisor of all block sizes the problem has n / g rows, and its
optimum is that of the whole, since a transportation problem with supplies divisible by g has such an optimal flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING, Any, Literal

from rlflow.reshard.atoms import AtomClass
from rlflow.reshard.errors import ReshardError
from rlflow.values import dataclass

if TYPE_CHECKING:
    from rlflow.reshard.endpoint import Fabric

ASSIGN_UP_TO = 2000
"""Rows up to which the assignment is solved exactly."""
Objective = Literal["total", "largest"]


@dataclass(frozen=True, slots=True)
class Mapping:
    """`devices[rank]` for the target; `reused` elements in all."""

    devices: tuple[int, ...]
    reused: int
    method: Literal["given", "assignment", "greedy"]
    """`given`: the order that was passed in is already optimal. `greedy`: not proven optimal."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Interchangeable ranks and devices, and the elements that a rank of a block reuses on a device of another."""

    ranks: tuple[tuple[int, ...], ...]
    devices: tuple[tuple[int, ...], ...]
    reuse: Any
    """Integers [rank blocks, device blocks]."""
    need: Any
    """Elements of a rank [rank blocks]."""


def map_ranks(
    classes: Sequence[AtomClass],
    source: tuple[int, ...],
    target: tuple[int, ...],
    *,
    objective: Objective = "total",
    together: int = 1,
    fabric: Fabric | None = None,
) -> Mapping:
    """A permutation of `target`, the devices of the target by rank; `classes` are of ranks, `source` as `target`.

    `total` reuses the most elements in all; `largest` makes the largest receiver's part least (bottleneck assignment),
    and among such mappings reuses the most. `together` = n keeps every n consecutive ranks (a tensor-parallel group)
    on one node of `fabric`: devices of a node in blocks of n, blocks assigned whole, which is optimal for those blocks.
    """
    blocks = _blocks(classes, source, target)
    if together > 1:
        if fabric is None:
            raise ReshardError("keeping ranks together needs the fabric")
        return _together(blocks, target, together, fabric)
    given = _reused(blocks, target)
    g = gcd(*map(len, blocks.ranks), *map(len, blocks.devices))
    if len(target) // g > ASSIGN_UP_TO:
        if objective == "largest":
            raise ReshardError(f"{len(target) // g} rows: the bottleneck assignment is solved up to {ASSIGN_UP_TO}")
        devices = _greedy(blocks)
        found = _reused(blocks, devices)
        return Mapping(devices, found, "greedy") if found > given else Mapping(target, given, "greedy")
    devices = _assign(blocks, g, objective)
    found = _reused(blocks, devices)
    if objective == "largest":
        same = _largest(blocks, devices) == _largest(blocks, target) and found == given
    else:
        same = found == given
    return Mapping(target, given, "given") if same else Mapping(devices, found, "assignment")


def _blocks(classes: Sequence[AtomClass], source: tuple[int, ...], target: tuple[int, ...]) -> _Blocks:
    import numpy as np

    needs: dict[int, list[int]] = {rank: [] for rank in range(len(target))}
    holds: dict[int, list[int]] = {device: [] for device in sorted(target)}
    for number, found in enumerate(classes):
        for rank in found.needers:
            needs[rank].append(number)
        for rank in found.holders:
            if source[rank] in holds:
                holds[source[rank]].append(number)
    by_need, by_hold = _same(needs), _same(holds)
    needing: dict[int, list[int]] = {}
    holding: dict[int, list[int]] = {}
    for members, signatures in ((needing, by_need), (holding, by_hold)):
        for index, signature in enumerate(signatures):
            for number in signature:
                members.setdefault(number, []).append(index)
    reuse = np.zeros((len(by_need), len(by_hold)), dtype=np.int64)
    need = np.zeros(len(by_need), dtype=np.int64)
    for number in sorted(needing):
        elements = classes[number].elements
        need[needing[number]] += elements
        if number in holding:
            reuse[np.ix_(needing[number], holding[number])] += elements
    return _Blocks(tuple(by_need.values()), tuple(by_hold.values()), reuse, need)


def _same(numbers: dict[int, list[int]]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Keys by equal values."""
    found: dict[tuple[int, ...], list[int]] = {}
    for key, value in numbers.items():
        found.setdefault(tuple(value), []).append(key)
    return {signature: tuple(keys) for signature, keys in found.items()}


def _indices(blocks: tuple[tuple[int, ...], ...]) -> dict[int, int]:
    return {member: index for index, block in enumerate(blocks) for member in block}


def _pairs(blocks: _Blocks, devices: tuple[int, ...]) -> list[tuple[int, int]]:
    rank_block, device_block = _indices(blocks.ranks), _indices(blocks.devices)
    return [(rank_block[rank], device_block[device]) for rank, device in enumerate(devices)]


def _reused(blocks: _Blocks, devices: tuple[int, ...]) -> int:
    return sum(int(blocks.reuse[pair]) for pair in _pairs(blocks, devices))


def _largest(blocks: _Blocks, devices: tuple[int, ...]) -> int:
    """Elements that the largest receiver misses."""
    return max(int(blocks.need[rank] - blocks.reuse[rank, device]) for rank, device in _pairs(blocks, devices))


def _assign(blocks: _Blocks, g: int, objective: Objective) -> tuple[int, ...]:
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    rows = np.repeat(np.arange(len(blocks.ranks)), [len(block) // g for block in blocks.ranks])
    columns = np.repeat(np.arange(len(blocks.devices)), [len(block) // g for block in blocks.devices])
    missing = blocks.need[rows][:, None] - blocks.reuse[np.ix_(rows, columns)]
    if objective == "largest":
        limit = _bottleneck(missing)
        forbidden = int(missing.max()) * len(rows) + 1  # dearer than any mapping without such a pair
        missing = np.where(missing > limit, forbidden, missing)
    chosen_rows, chosen_columns = linear_sum_assignment(missing.astype(np.float64))
    return _deal(blocks, [(int(rows[i]), int(columns[j]), g) for i, j in zip(chosen_rows, chosen_columns, strict=True)])


def _bottleneck(missing: Any) -> int:
    """The least t for which the pairs that miss at most t have a perfect matching (Hopcroft and Karp 1973)."""
    import numpy as np
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_bipartite_matching

    values = np.unique(missing)
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        matched = maximum_bipartite_matching(csr_matrix(missing <= values[middle]), perm_type="column")
        if (matched >= 0).all():
            high = middle
        else:
            low = middle + 1
    return int(values[low])


def _greedy(blocks: _Blocks) -> tuple[int, ...]:
    """The pair of blocks with the most reuse first."""
    import numpy as np

    left_ranks = [len(block) for block in blocks.ranks]
    left_devices = [len(block) for block in blocks.devices]
    order = np.argsort(-blocks.reuse, axis=None, kind="stable")
    dealt: list[tuple[int, int, int]] = []
    for rank, device in zip(*np.unravel_index(order, blocks.reuse.shape), strict=True):
        count = min(left_ranks[rank], left_devices[device])
        if count:
            dealt.append((int(rank), int(device), count))
            left_ranks[rank] -= count
            left_devices[device] -= count
    return _deal(blocks, dealt)


def _deal(blocks: _Blocks, dealt: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """(rank block, device block, how many) to devices by rank, members of a block in ascending order."""
    free_ranks = [iter(block) for block in blocks.ranks]
    free_devices = [iter(block) for block in blocks.devices]
    found: dict[int, int] = {}
    for rank, device, count in dealt:
        for _ in range(count):
            found[next(free_ranks[rank])] = next(free_devices[device])
    return tuple(found[rank] for rank in range(len(found)))


def _together(blocks: _Blocks, target: tuple[int, ...], size: int, fabric: Fabric) -> Mapping:
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    nodes: dict[int, list[int]] = {}
    for device in sorted(target):
        nodes.setdefault(fabric.node_of[device], []).append(device)
    odd = [node for node, members in nodes.items() if len(members) % size]
    if odd:
        raise ReshardError(f"node {node} has {len(nodes[node])} devices, not a multiple of {size}" for node in odd)
    groups = [tuple(range(first, first + size)) for first in range(0, len(target), size)]
    places = [tuple(m[first : first + size]) for m in nodes.values() for first in range(0, len(m), size)]
    rank_block, device_block = _indices(blocks.ranks), _indices(blocks.devices)
    inner: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, tuple[int, ...]]] = {}

    def best(group: tuple[int, ...], place: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Most reuse of a group on a place, and the place's member for each rank of the group."""
        rows, columns = tuple(rank_block[r] for r in group), tuple(device_block[d] for d in place)
        if (rows, columns) not in inner:
            part = blocks.reuse[np.ix_(rows, columns)]
            straight = int(np.trace(part))
            _, order = linear_sum_assignment(-part)
            value = int(part[np.arange(size), order].sum())
            members = tuple(range(size)) if value == straight else tuple(map(int, order))
            inner[rows, columns] = (value, members)
        return inner[rows, columns]

    value = np.array([[best(group, place)[0] for place in places] for group in groups])
    _, chosen = linear_sum_assignment(-value)
    devices = tuple(places[j][m] for i, j in enumerate(chosen) for m in best(groups[i], places[j])[1])
    found, given = _reused(blocks, devices), _reused(blocks, target)
    legal = all(len({fabric.node_of[target[rank]] for rank in group}) == 1 for group in groups)
    return Mapping(target, given, "given") if legal and given >= found else Mapping(devices, found, "assignment")
