"""All ways to put the stages on pools: set partitions, each once, without those that pins forbid.

Partitions are restricted growth strings (the pool of a stage is at most one above the largest before it; Knuth, The
Art of Computer Programming 4A, 7.2.1.5), built stage by stage, so that a pool that breaks a rule ends the whole
branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product


@dataclass(frozen=True, slots=True)
class Part:
    """The stages of one pool by position, increasing, and the name of a declared pool if it is one."""

    stages: tuple[int, ...]
    pool: str | None = None


Partition = tuple[Part, ...]
"""In order of each pool's first stage."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a partition must respect. Stages are positions."""

    homes: Mapping[int, str] = field(default_factory=dict)
    """Stages that must be on a declared pool."""
    together: tuple[tuple[int, ...], ...] = ()
    """Groups that share a pool."""
    apart: tuple[tuple[int, ...], ...] = ()
    """Groups of which no two share a pool."""
    declared: Mapping[str, Hashable] = field(default_factory=dict)
    """Declared pools in order, with what tells them apart (pinned devices, type); None for nothing.

    One that is no stage's home may take any stages, or stay empty.
    """
    only_declared: bool = False
    """Every stage must be on a declared pool."""
    alike: tuple[tuple[int, ...], ...] = ()
    """Groups of stages that may change places without changing anything: of such partitions only the first appears."""


Prune = Callable[[Sequence[Part]], bool]
"""Whether no partition can help that puts the stages so far, and maybe more, on these pools."""


def partitions(stages: int, rules: Rules, prune: Prune | None = None) -> Iterator[Partition]:
    """Every partition of positions 0 to `stages` - 1 that the rules allow, each once, in a fixed order."""
    unknown = sorted(set(rules.homes.values()) - set(rules.declared))
    if unknown:
        raise ValueError(f"not declared: {', '.join(unknown)}")
    group = {stage: number for number, stages_ in enumerate(rules.together) for stage in stages_}
    enemies: dict[int, set[int]] = {i: set() for i in range(stages)}
    for some in rules.apart:
        for stage in some:
            enemies[stage] |= set(some) - {stage}
    kind = {stage: ("alike", number) for number, some in enumerate(rules.alike) for stage in some}
    seen: set[Hashable] = set()
    # Depth first with an explicit stack of parts; later pools are pushed first, so that sharing comes out first.
    stack: list[tuple[Part, ...]] = [()]
    while stack:
        parts = stack.pop()
        stage = sum(len(part.stages) for part in parts)
        if parts and prune is not None and prune(parts):
            continue
        if stage == stages:
            for named in _named(parts, rules):
                key = _key(named, kind)
                if key not in seen:
                    seen.add(key)
                    yield named
            continue
        home = rules.homes.get(stage)
        mates = {i for part in parts for i in part.stages if stage in group and group.get(i) == group[stage]}
        after: list[tuple[Part, ...]] = []
        for number, part in enumerate(parts):
            clash = home is not None and part.pool is not None and part.pool != home
            taken = home is not None and part.pool is None and any(p.pool == home for p in parts)
            if clash or taken or not mates <= set(part.stages) or enemies[stage] & set(part.stages):
                continue
            joined = Part((*part.stages, stage), part.pool or home)
            after.append((*parts[:number], joined, *parts[number + 1 :]))
        if not mates and (home is None or all(part.pool != home for part in parts)):
            after.append((*parts, Part((stage,), home)))
        stack.extend(reversed(after))


def _named(parts: Partition, rules: Rules) -> Iterator[Partition]:
    """The partition with declared pools that are no stage's home given to pools without a name, in every way.

    Declared pools that nothing tells apart are given out in order.
    """
    used = {part.pool for part in parts}
    free: dict[Hashable, list[str]] = {}
    for name, mark in rules.declared.items():
        if name not in used and name not in rules.homes.values():
            free.setdefault(mark, []).append(name)
    unnamed = [number for number, part in enumerate(parts) if part.pool is None]
    plain = free.pop(None, [])
    marks = list(free)
    for chosen in product((-1, *range(len(marks))), repeat=len(unnamed)):
        counts = Counter(chosen)
        if any(counts[m] > len(free[mark]) for m, mark in enumerate(marks)):
            continue
        if rules.only_declared and counts[-1] > len(plain):
            continue
        names = {m: iter(free[mark]) for m, mark in enumerate(marks)} | {-1: iter(plain)}
        result = list(parts)
        for number, m in zip(unnamed, chosen, strict=True):
            result[number] = Part(parts[number].stages, next(names[m], None))
        yield tuple(result)


def _key(parts: Partition, kind: Mapping[int, Hashable]) -> Hashable:
    """Equal for partitions that differ only by stages that are alike."""
    blocks = (
        (part.pool, tuple(sorted(Counter(kind.get(i, i) for i in part.stages).items(), key=repr))) for part in parts
    )
    return tuple(sorted(blocks, key=repr))
