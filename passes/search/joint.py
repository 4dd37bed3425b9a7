"""The best joint choice of options for the stages that share a pool.

Two things couple the choices: a reshard between stages depends on both layout classes, and bytes add up on a device.
First the bytes are left out (`states.fastest`). Where the choice found needs no swap, or is too slow even so, that is
the answer; otherwise `states.fastest_within` carries the bytes along. Both are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlflow.passes.search.options import COSTS, StageOption
from rlflow.passes.search.states import SLACK, PairCost, fastest, fastest_within, leanest

WIDENING = (0.05, 0.3)
"""How far above a lower bound the choice is looked for first, as fractions of it."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes on the fullest device of a pool, with nothing swapped out."""

    static_bytes: int
    """Sum of the static bytes of all stages."""
    peak_bytes: int
    """Largest sum while a stage runs: its peak, and the static bytes of the others."""


Swap = Callable[[Load], float]
"""Seconds a period of moving bytes to the host and back; infinite when it cannot fit. Must not decrease with the
bytes."""


def resident(limit_bytes: int) -> Swap:
    """No swapping: everything stays on the device, or it does not fit."""

    def seconds(load: Load) -> float:
        return 0.0 if load.peak_bytes <= limit_bytes else math.inf

    return seconds


def swap_overflow(limit_bytes: int, bytes_per_second: float, host_bytes: int | None = None) -> Swap:
    """What exceeds the limit leaves once and returns once a period: a lower bound, exact for one crowded phase.

    `host_bytes` is host memory per device, None for enough. Stages whose own peak exceeds the limit are not in tables.
    """

    def seconds(load: Load) -> float:
        overflow = max(0, load.peak_bytes - limit_bytes)
        if host_bytes is not None and overflow > host_bytes:
            return math.inf
        return 2.0 * overflow / bytes_per_second

    return seconds


@dataclass(frozen=True, slots=True)
class Joint:
    """One option for every stage, in step order."""

    seconds: float
    """Stages, reshards and swap together."""
    choices: tuple[StageOption, ...]
    reshard_seconds: tuple[float, ...]
    """Before each stage."""
    swap_seconds: float
    load: Load


def best_joint(
    options: Sequence[Sequence[StageOption]],
    links: Sequence[tuple[int, int]],
    reshard: PairCost,
    swap: Swap,
    limit: float = math.inf,
) -> Joint | None:
    """The choice with the least seconds, if at most `limit`; None otherwise.

    `options` of every stage in step order; `links` are the pairs (from, to) of positions between which a reshard runs.
    """
    if not all(options):
        return None
    first = [min(some, key=COSTS) for some in options]
    best = min((evaluate(c, links, reshard, swap) for c in (first, _uniform(options, first))), key=lambda j: j.seconds)
    room = min(limit, best.seconds) * (1.0 + SLACK)
    relaxed = fastest(options, links, reshard, room)
    if relaxed is None:  # none is faster than the bound, so only a choice that reaches it remains
        return best if best.seconds <= limit and best.seconds < math.inf else None
    found = evaluate(relaxed, links, reshard, swap)
    if found.swap_seconds > 0.0:
        lower = sum(option.seconds for option in relaxed) + sum(found.reshard_seconds)
        for choice in _leaner(options, found):
            best = min(best, evaluate(choice, links, reshard, swap), key=lambda j: j.seconds)
        room = min(room, best.seconds * (1.0 + SLACK))
        exact = _within(options, links, reshard, swap, lower, room)
        found = best if exact is None else evaluate(exact, links, reshard, swap)
    if best.seconds <= found.seconds:
        found = best
    return found if found.seconds <= limit and found.seconds < math.inf else None


def _within(
    options: Sequence[Sequence[StageOption]],
    links: Sequence[tuple[int, int]],
    reshard: PairCost,
    swap: Swap,
    lower: float,
    room: float,
) -> list[StageOption] | None:
    """`fastest_within(room)`, tried with bounds just above `lower` first: the narrower the bound the fewer the
    labels."""

    def cost(static_bytes: int, peak_bytes: int) -> float:
        return swap(Load(static_bytes, peak_bytes))

    for share in WIDENING:
        if lower * (1.0 + share) >= room:
            break
        found = fastest_within(options, links, reshard, cost, lower * (1.0 + share))
        if found is not None:
            return found
    return fastest_within(options, links, reshard, cost, room)


def _uniform(options: Sequence[Sequence[StageOption]], first: Sequence[StageOption]) -> list[StageOption]:
    """The fastest choice in the class of one of the stages, for those that have it: few reshards, so a good guess."""
    slowest = max(first, key=lambda option: option.seconds)
    made = ((o for o in some if o.layout_class == slowest.layout_class) for some in options)
    return [min(some, key=COSTS, default=own) for some, own in zip(made, first, strict=True)]


def _leaner(options: Sequence[Sequence[StageOption]], found: Joint) -> list[list[StageOption]]:
    """Guesses that pay for bytes with time, at growing prices: what swapping costs now, and multiples of it."""
    swapped = min(found.swap_seconds, found.seconds - found.swap_seconds) if found.seconds < math.inf else 1.0
    price = swapped / max(1, found.load.static_bytes)

    def cost(option: StageOption, factor: int) -> float:
        return option.seconds + factor * price * option.static_bytes

    return [[min(some, key=lambda o, f=factor: cost(o, f)) for some in options] for factor in (1, 2, 4, 8)]  # type: ignore[misc]


def least_load(options: Sequence[Sequence[StageOption]]) -> tuple[Load, int] | None:
    """The joint choice with the least peak: its load, and the position of the stage that peaks. Any time is allowed."""
    if not all(options):
        return None
    choices = leanest(options)
    load = load_of(choices)
    return load, max(range(len(choices)), key=lambda i: choices[i].peak_bytes - choices[i].static_bytes)


def evaluate(choices: Sequence[StageOption], links: Sequence[tuple[int, int]], reshard: PairCost, swap: Swap) -> Joint:
    """The cost of a complete choice; its seconds are infinite when it does not fit."""
    before = [0.0] * len(choices)
    for a, b in links:
        before[b] += reshard(a, choices[a].layout_class, b, choices[b].layout_class)
    load = load_of(choices)
    swapped = swap(load)
    seconds = 0.0
    for option, moved in zip(choices, before, strict=True):
        seconds += option.seconds + moved
    return Joint(seconds + swapped, tuple(choices), tuple(before), swapped, load)


def load_of(choices: Sequence[StageOption]) -> Load:
    static = sum(option.static_bytes for option in choices)
    return Load(static, max((static + o.peak_bytes - o.static_bytes for o in choices), default=0))
