"""Random problems, and answers found by trying everything. Load it by path: test folders are no packages."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product

from hypothesis import strategies as st

from rlflow.passes.search.options import StageOption
from rlflow.passes.search.pool_time import Links, consecutive

LIMIT = 20
"""Bytes of a device in random problems: small, so that memory often decides."""

NOWHERE: Mapping[int, int] = {}
"""Stage to the stage whose weights it reads."""

Moves = dict[tuple[str, Hashable, str, Hashable], float]


def options(sizes: Sequence[int], most: int = 5, peak: int = 26) -> st.SearchStrategy[list[StageOption]]:
    """Options of a stage on some of the sizes, of two classes; some are too large for LIMIT. Times are quarters of a second, so that
    sums are exact."""

    def made(devices: int, seconds: int, static: int, extra: int, layout_class: str, number: int) -> StageOption:
        return StageOption(
            devices, seconds / 4, static, min(static + extra, peak), (layout_class, devices, number), layout_class
        )

    one = st.builds(
        made,
        st.sampled_from(list(sizes)),
        st.integers(0, 48),
        st.integers(0, 12),
        st.integers(0, 14),
        st.sampled_from("ab"),
        st.integers(0, 99),
    )
    return st.lists(one, min_size=1, max_size=most)


def reshards(stages: Sequence[str]) -> st.SearchStrategy[Moves]:
    """Whole seconds for every pair of stages and classes; from a stage to itself, of weights from another pool."""
    keys = [(a, x, b, y) for a in stages for b in stages for x in "ab" for y in "ab" if a != b or x == y]
    return st.lists(st.integers(0, 4), min_size=len(keys), max_size=len(keys)).map(
        lambda values: dict(zip(keys, map(float, values), strict=True))
    )


def publishing(sources: Mapping[int, int]) -> Links:
    """Between stages `s0`, `s1`, ...: the cycle of those of a pool, and weights from sources on other pools."""

    def links(names: tuple[str, ...]) -> list[tuple[int, int]]:
        here = [int(name[1:]) for name in names]
        away = [(at, at) for at, stage in enumerate(here) if stage in sources and sources[stage] not in here]
        return [*consecutive(names), *away]

    return links


# --- all there is -----------------------------------------------------------------------------------------------------


def set_partitions(stages: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """By recursion on the last stage."""
    if stages == 0:
        yield ()
        return
    last = stages - 1
    for before in set_partitions(last):
        for number, block in enumerate(before):
            yield (*before[:number], (*block, last), *before[number + 1 :])
        yield (*before, (last,))


@dataclass(frozen=True)
class Whole:
    """One choice for a pool, with everything added up."""

    seconds: float
    choices: tuple[StageOption, ...]


def pool_choices(
    block: Sequence[int],
    devices: int,
    tables: Sequence[Sequence[StageOption]],
    stages: Sequence[str],
    moves: Moves,
    swap: Callable[[int, int], float],
    sources: Mapping[int, int] = NOWHERE,
) -> Iterator[Whole]:
    """Every joint choice of options; reshards from each stage to the next, round the cycle, and to those whose source is
    not in the pool."""
    usable = [[o for o in tables[i] if o.devices <= devices and o.peak_bytes <= LIMIT] for i in block]
    for choices in product(*usable):
        static = sum(o.static_bytes for o in choices)
        peak = max(static - o.static_bytes + o.peak_bytes for o in choices)
        seconds = sum(o.seconds for o in choices) + swap(static, peak)
        if len(block) > 1:
            for i in range(len(block)):
                j = (i + 1) % len(block)
                seconds += moves[stages[block[i]], choices[i].layout_class, stages[block[j]], choices[j].layout_class]
        for i, option in zip(block, choices, strict=True):
            if i in sources and sources[i] not in block:
                seconds += moves[stages[i], option.layout_class, stages[i], option.layout_class]
        yield Whole(seconds, choices)


def pool_time(*args: object) -> float:
    return min((w.seconds for w in pool_choices(*args)), default=math.inf)  # type: ignore[arg-type]


def has_room(sizes: Sequence[int], hosts: Sequence[int]) -> bool:
    """Every order of pools, every first device: a pool in one host anywhere, a longer one from an unused host on."""
    return any(_place(list(order), [0] * len(hosts), hosts) for order in set(permutations(sizes)))


def _place(sizes: list[int], used: list[int], hosts: Sequence[int]) -> bool:
    if not sizes:
        return True
    size, rest = sizes[0], sizes[1:]
    for host in range(len(hosts)):
        if used[host] + size <= hosts[host]:
            after = [u + size if h == host else u for h, u in enumerate(used)]
            if _place(rest, after, hosts):
                return True
        left, at, after = size, host, list(used)
        while left > 0 and at < len(hosts) and after[at] == 0:
            after[at] = min(left, hosts[at])
            left -= after[at]
            at += 1
        if left <= 0 and _place(rest, after, hosts):
            return True
    return False


def resident(static: int, peak: int) -> float:
    """The swap price of pool_choices when nothing is swapped."""
    return 0.0 if peak <= LIMIT else math.inf


def overflow(static: int, peak: int) -> float:
    """2 s for every byte above the limit."""
    return 2.0 * max(0, peak - LIMIT)


def best_period(
    tables: Sequence[Sequence[StageOption]],
    sizes: Sequence[int],
    hosts: Sequence[int],
    moves: Moves,
    swap: Callable[[int, int], float],
    allowed: Callable[[tuple[tuple[int, ...], ...], tuple[int, ...]], bool] = lambda partition, chosen: True,
    sources: Mapping[int, int] = NOWHERE,
) -> float:
    """The least time of the slowest pool over all partitions, sizes and joint choices."""
    stages = [f"s{i}" for i in range(len(tables))]
    times: dict[tuple[tuple[int, ...], int], float] = {}
    rooms: dict[tuple[int, ...], bool] = {}
    best = math.inf
    for partition in set_partitions(len(tables)):
        for chosen in product(sizes, repeat=len(partition)):
            key = tuple(sorted(chosen))
            if key not in rooms:
                rooms[key] = sum(key) <= sum(hosts) and has_room(key, hosts)
            if not rooms[key] or not allowed(partition, chosen):
                continue
            for block, n in zip(partition, chosen, strict=True):
                if (block, n) not in times:
                    times[block, n] = pool_time(block, n, tables, stages, moves, swap, sources)
            best = min(best, max(times[block, n] for block, n in zip(partition, chosen, strict=True)))
    return best
