"""Atoms: the common refinement of two shardings, gathered in classes of equal holders and needers.

Tensors of equal structure on the same pipeline stages are refined once, so the work does not grow with the number of
layers.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from itertools import pairwise

from rlflow.reshard.boxes import Box, rows, volume
from rlflow.reshard.catalogue import TensorSpec
from rlflow.reshard.errors import ReshardError
from rlflow.reshard.shards import Groups, Sharding
from rlflow.values import dataclass

Stages = tuple[int, ...]
Owners = frozenset[int]
"""Numbers of the groups of equal shards that have an atom."""


@dataclass(frozen=True)
class Part:
    """The same boxes of several tensors of equal structure."""

    names: tuple[str, ...]
    boxes: tuple[Box, ...]

    @cached_property
    def elements_each(self) -> int:
        return sum(map(volume, self.boxes))

    @property
    def elements(self) -> int:
        return len(self.names) * self.elements_each

    @cached_property
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """Elements, rows, and elements of a row, of every box."""
        return tuple((volume(box), *rows(box)) for box in self.boxes)


@dataclass(frozen=True)
class AtomClass:
    """What exactly these source ranks hold and exactly these target ranks need. Both are sorted."""

    holders: tuple[int, ...]
    needers: tuple[int, ...]
    parts: tuple[Part, ...]

    @cached_property
    def elements(self) -> int:
        return sum(part.elements for part in self.parts)


@dataclass(frozen=True, slots=True)
class _Tagged:
    box: Box
    side: int
    group: int


def refine(source: Groups, target: Groups) -> dict[tuple[Owners, Owners], list[Box]]:
    """Boxes by (source groups that hold them, target groups that need them): a sweep, one dimension after another.

    Boxes that a side has twice in one group are an error of the sharding and not looked for here.
    """
    tagged = [
        _Tagged(box, side, number)
        for side, groups in enumerate((source, target))
        for number, (boxes, _) in enumerate(groups)
        for box in boxes
    ]
    found: dict[tuple[Owners, Owners], list[Box]] = {}
    for box, owners in _sweep(tagged, 0):
        found.setdefault(owners, []).append(box)
    return found


Cells = list[tuple[Box, tuple[Owners, Owners]]]


def _sweep(tagged: list[_Tagged], dim: int) -> Cells:
    """Cells of dimensions `dim` and on. Neighbouring intervals with the same cells are merged."""
    rest = {t.box[dim:] for t in tagged}
    if len(rest) == 1:
        owners = tuple(frozenset(t.group for t in tagged if t.side == side) for side in (0, 1))
        return [(rest.pop(), (owners[0], owners[1]))]
    opening: dict[int, list[_Tagged]] = {}
    closing: dict[int, list[_Tagged]] = {}
    for t in tagged:
        low, high = t.box[dim]
        opening.setdefault(low, []).append(t)
        closing.setdefault(high, []).append(t)
    active: dict[_Tagged, None] = {}
    cells: Cells = []
    before: tuple[int, int, Cells] | None = None
    cuts = sorted(opening.keys() | closing.keys())
    for low, high in pairwise(cuts):
        for t in closing.get(low, ()):
            del active[t]
        active.update(dict.fromkeys(opening.get(low, ())))
        inner = _sweep(list(active), dim + 1) if active else []
        if before is not None and before[1] == low and before[2] == inner:
            before = (before[0], high, inner)
        else:
            cells += _emit(before)
            before = (low, high, inner)
    return cells + _emit(before)


def _emit(run: tuple[int, int, Cells] | None) -> Cells:
    if run is None:
        return []
    low, high, inner = run
    return [(((low, high), *box), owners) for box, owners in inner]


def atom_classes(source: Sharding, target: Sharding) -> tuple[AtomClass, ...]:
    """All atoms that somebody needs, in classes, in an order that depends on catalogue and layouts only.

    Holders and needers are ranks. ReshardError lists needed tensors of which the source lacks a part.
    """
    families: dict[tuple[Hashable, Stages, Stages], list[TensorSpec]] = {}
    refined: dict[Hashable, dict[tuple[Owners, Owners], list[Box]]] = {}
    for spec in target.catalogue:
        structure: Hashable = (_structure(source, spec.name), _structure(target, spec.name))
        families.setdefault((structure, source.stages(spec), target.stages(spec)), []).append(spec)
    ranks = _Ranks()
    parts: dict[tuple[int, int], list[Part]] = {}
    problems = []
    for (structure, from_stages, to_stages), specs in families.items():
        if not to_stages:
            continue
        names = tuple(spec.name for spec in specs)
        have, need = source.groups(names[0]), target.groups(names[0])
        if structure not in refined:
            refined[structure] = refine(have, need)
        for (holders, needers), boxes in refined[structure].items():
            if not needers:
                continue
            if not holders or not from_stages:
                problems += [f"{name}: the source does not hold {list(map(list, boxes[0]))}" for name in names]
                continue
            key = (
                ranks.number(("s", structure, holders, from_stages), have, holders, from_stages, source.stage_size),
                ranks.number(("t", structure, needers, to_stages), need, needers, to_stages, target.stage_size),
            )
            parts.setdefault(key, []).append(Part(names, tuple(boxes)))
    if problems:
        raise ReshardError(problems)
    return tuple(AtomClass(ranks[h], ranks[n], tuple(found)) for (h, n), found in parts.items())


def _structure(side: Sharding, name: str) -> tuple[Hashable, int]:
    local, part = side.local(name)
    return local.structure, part


class _Ranks:
    """Sets of ranks as small numbers, equal sets as equal numbers."""

    def __init__(self) -> None:
        self._sets: dict[tuple[int, ...], int] = {}
        self._list: list[tuple[int, ...]] = []
        self._known: dict[Hashable, int] = {}

    def __getitem__(self, number: int) -> tuple[int, ...]:
        return self._list[number]

    def number(self, key: Hashable, groups: Groups, chosen: Owners, stages: tuple[int, ...], stage_size: int) -> int:
        """Of the ranks of the chosen groups on all of the stages."""
        if key not in self._known:
            local = sorted(rank for group in chosen for rank in groups[group][1])
            found = tuple(stage * stage_size + rank for stage in stages for rank in local)
            if found not in self._sets:
                self._sets[found] = len(self._list)
                self._list.append(found)
            self._known[key] = self._sets[found]
        return self._known[key]
