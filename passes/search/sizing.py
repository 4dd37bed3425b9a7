"""Sizes for the pools of one partition when the period is a function of all of them: exhaustive, or by local search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations


@dataclass(frozen=True, slots=True, order=True)
class PoolChoice:
    """A device type and a number of devices for one pool."""

    devices: int
    kind: int


@dataclass(frozen=True, slots=True)
class Found:
    """`exact`: no other sizes have a shorter period."""

    period: float
    choices: tuple[PoolChoice, ...]
    looked_at: int
    exact: bool

    @property
    def key(self) -> tuple[float, int, tuple[PoolChoice, ...]]:
        return self.period, sum(choice.devices for choice in self.choices), self.choices


Evaluate = Callable[[tuple[PoolChoice, ...]], float]
Room = Callable[[Sequence[PoolChoice]], bool]


def exhaustive(
    options: Sequence[Sequence[PoolChoice]], room: Room, evaluate: Evaluate, floor: Evaluate, upper: float
) -> Found | None:
    """The best sizes with a period of at most `upper`, by branch and bound over all of them.

    `options` of every pool, in increasing order. `room` must grant fewer devices where it grants more. `floor` is a
    lower bound of `evaluate` that never grows with a pool's size. Of equal periods the one with the fewest devices.
    """
    if not all(options):
        return None
    # Per device type the largest pool is the fastest, so these are the best that pools still open can be.
    fastest = [_largest_of_each_kind(some) for some in options]
    best: Found | None = None
    looked_at = 0
    stack: list[tuple[PoolChoice, ...]] = [()]
    while stack:
        chosen = stack.pop()
        limit = upper if best is None else best.period
        if not room(chosen):
            continue
        if len(chosen) < len(options):
            if _ideal(chosen, fastest, floor) > limit:
                continue
            stack.extend((*chosen, option) for option in reversed(options[len(chosen)]))
            continue
        if floor(chosen) > limit:
            continue
        looked_at += 1
        found = Found(evaluate(chosen), chosen, looked_at, True)
        if found.period <= limit and found.period < math.inf and (best is None or found.key < best.key):
            best = found
    return None if best is None else Found(best.period, best.choices, looked_at, True)


def _largest_of_each_kind(some: Sequence[PoolChoice]) -> list[PoolChoice]:
    found: dict[int, PoolChoice] = {}
    for choice in some:
        found[choice.kind] = max(choice, found.get(choice.kind, choice))
    return [found[kind] for kind in sorted(found)]


def _ideal(chosen: tuple[PoolChoice, ...], fastest: Sequence[Sequence[PoolChoice]], floor: Evaluate) -> float:
    """The least bound over the types of the pools still open, each as large as it can be."""
    rest: list[tuple[PoolChoice, ...]] = [()]
    for kinds in fastest[len(chosen) :]:
        rest = [(*before, kind) for before in rest for kind in kinds]
    return min(floor((*chosen, *after)) for after in rest)


def local_search(
    options: Sequence[Sequence[PoolChoice]],
    room: Room,
    evaluate: Evaluate,
    starts: Sequence[tuple[PoolChoice, ...]],
    stop: Callable[[], bool] = lambda: False,
) -> Found | None:
    """Steepest descent from each start: one pool larger or smaller, or one larger and another smaller, by 1, 2, 4, ...
    places in its sizes, or on another device type. The best of all ends; not exact. `stop` ends it early."""
    known: dict[tuple[PoolChoice, ...], float] = {}
    by_kind = [_by_kind(some) for some in options]

    def look(choices: tuple[PoolChoice, ...]) -> Found:
        if choices not in known:
            known[choices] = evaluate(choices)
        return Found(known[choices], choices, 0, False)

    best: Found | None = None
    for start in starts:
        if not room(start):
            continue
        here = look(start)
        while not stop():
            near = [look(choices) for choices in _moves(here.choices, by_kind) if room(choices)]
            found = min(near, key=lambda f: f.key, default=here)
            if found.key >= here.key:
                break
            here = found
        if best is None or here.key < best.key:
            best = here
    if best is None or best.period == math.inf:
        return None
    return Found(best.period, best.choices, len(known), False)


def _by_kind(some: Sequence[PoolChoice]) -> dict[int, list[PoolChoice]]:
    found: dict[int, list[PoolChoice]] = {}
    for choice in sorted(some):
        found.setdefault(choice.kind, []).append(choice)
    return found


def _moves(at: tuple[PoolChoice, ...], by_kind: Sequence[dict[int, list[PoolChoice]]]) -> list[tuple[PoolChoice, ...]]:
    """The neighbours, each once, in a fixed order."""
    larger = [_steps(choice, kinds, 1) for choice, kinds in zip(at, by_kind, strict=True)]
    smaller = [_steps(choice, kinds, -1) for choice, kinds in zip(at, by_kind, strict=True)]
    found: dict[tuple[PoolChoice, ...], None] = {}
    for pool, kinds in enumerate(by_kind):
        others = [c for kind, some in kinds.items() if kind != at[pool].kind for c in _near(some, at[pool].devices)]
        for choice in (*larger[pool], *smaller[pool], *others):
            found[(*at[:pool], choice, *at[pool + 1 :])] = None
    for up, down in permutations(range(len(at)), 2):
        for more in larger[up]:
            for less in smaller[down]:
                moved = list(at)
                moved[up], moved[down] = more, less
                found[tuple(moved)] = None
    for a, b in combinations(range(len(at)), 2):
        swapped = list(at)
        swapped[a], swapped[b] = at[b], at[a]
        if at[b] in by_kind[a].get(at[b].kind, ()) and at[a] in by_kind[b].get(at[a].kind, ()):
            found[tuple(swapped)] = None
    return list(found)


def _steps(choice: PoolChoice, kinds: dict[int, list[PoolChoice]], sign: int) -> list[PoolChoice]:
    some = kinds[choice.kind]
    index, step, found = some.index(choice), 1, []
    while 0 <= index + sign * step < len(some):
        found.append(some[index + sign * step])
        step *= 2
    return found


def _near(some: list[PoolChoice], devices: int) -> list[PoolChoice]:
    """The size nearest from below and from above."""
    below = [choice for choice in some if choice.devices <= devices]
    above = [choice for choice in some if choice.devices > devices]
    return below[-1:] + above[:1]
