"""Hosts: which sizes pools come in, and whether pools of given sizes find room.

A pool inside one host takes free devices of it. A pool on several hosts starts on an unused host and runs on without a
gap; what it leaves of its last host is free for others.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

MOST_ORDERS = 14
"""Above so many pools of one type only the order of falling size is tried (2^k sets otherwise)."""


@dataclass(frozen=True, slots=True)
class Place:
    """A device of a host, both by number. From here on a pool goes on without a gap."""

    host: int
    device: int


def pool_sizes(hosts: Sequence[int]) -> tuple[int, ...]:
    """The sizes worth trying on hosts of so many devices: 1, 2, 4, ... below a host, and multiples of a host.

    With unequal hosts the multiples of each kind, and the first hosts together for every number of them.
    """
    total = sum(hosts)
    found = set(accumulate(hosts))
    for size in set(hosts):
        found.update(range(size, total + 1, size))
        found.update(1 << i for i in range(size.bit_length()) if 1 << i < size)
    return tuple(sorted(n for n in found if 0 < n <= total))


def allocate(sizes: Sequence[int], hosts: tuple[int, ...]) -> tuple[Place, ...] | None:
    """Where every pool starts, in the order given; None when there is no room. Exact up to 14 pools.

    Pools lie on the hosts in some order from left to right, and for a set of pools the allocation that ends earliest
    leaves the most, so the earliest end of every set decides (dynamic programming over sets). Smaller pools always find
    room where larger ones do.
    """
    sums = _sums(hosts)
    if sum(sizes) > sums[-1] or any(size < 1 for size in sizes):
        return None
    falling = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    found = _in_order(falling, sizes, hosts, sums)
    if found is None and len(sizes) <= MOST_ORDERS:
        order = _any_order(sizes, hosts, sums)
        found = None if order is None else _in_order(order, sizes, hosts, sums)
    return None if found is None else tuple(found[pool] for pool in range(len(sizes)))


def slots(start: Place, size: int, hosts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The devices of a pool: (host, first device, how many) of every host it is on."""
    host, first = start.host, start.device
    while size > 0:
        count = min(size, hosts[host] - first)
        if count:
            yield host, first, count
        size -= count
        host, first = host + 1, 0


@lru_cache(maxsize=64)
def _sums(hosts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(hosts, initial=0))


def _next(at: Place, size: int, hosts: Sequence[int], sums: Sequence[int]) -> tuple[Place, Place] | None:
    """Where a pool starts that comes next, and the place after it: the earliest end."""
    if at.host < len(hosts) and size <= hosts[at.host] - at.device:
        return at, Place(at.host, at.device + size)
    host = at.host + (1 if at.device else 0)
    if host >= len(hosts) or sums[-1] - sums[host] < size:
        return None
    last = bisect_left(sums, sums[host] + size) - 1
    return Place(host, 0), Place(last, sums[host] + size - sums[last])


def _in_order(
    order: Sequence[int], sizes: Sequence[int], hosts: Sequence[int], sums: Sequence[int]
) -> dict[int, Place] | None:
    starts: dict[int, Place] = {}
    at = Place(0, 0)
    for pool in order:
        found = _next(at, sizes[pool], hosts, sums)
        if found is None:
            return None
        starts[pool], at = found
    return starts


def _any_order(sizes: Sequence[int], hosts: Sequence[int], sums: Sequence[int]) -> list[int] | None:
    """An order that finds room: the earliest end of every set of pools, smaller sets first."""
    count = len(sizes)
    ends: list[tuple[int, int, int] | None] = [None] * (1 << count)  # host, used, the pool that was put last
    ends[0] = (0, 0, -1)
    for chosen in range(1, 1 << count):
        best: tuple[int, int, int] | None = None
        for pool in range(count):
            before = ends[chosen & ~(1 << pool)] if chosen >> pool & 1 else None
            if before is None:
                continue
            found = _next(Place(before[0], before[1]), sizes[pool], hosts, sums)
            if found is not None:
                end = found[1].host, found[1].device, pool
                best = end if best is None else min(best, end)
        ends[chosen] = best
    order: list[int] = []
    chosen = (1 << count) - 1
    while chosen:
        last = ends[chosen]
        if last is None:
            return None
        order.append(last[2])
        chosen &= ~(1 << last[2])
    return order[::-1]


def assign(wanted: Sequence[Sequence[int | None]], hosts: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """A device type for every pool such that all find room; None when there is none.

    `wanted[pool][type]` is the size the pool needs on that type, None where it cannot run; `hosts[type]` the devices
    of its hosts. Exact: depth first over pools, types in order of the devices they cost. Of several the one with the
    fewest devices in all, then the smallest types in order.
    """
    if len(hosts) == 1:
        sizes = [row[0] for row in wanted]
        if any(size is None for size in sizes) or allocate([s for s in sizes if s is not None], hosts[0]) is None:
            return None
        return (0,) * len(wanted)
    least = [min((size for size in row if size is not None), default=math.inf) for row in wanted]
    rest = [sum(least[i:]) for i in range(len(wanted) + 1)]
    totals = [sum(h) for h in hosts]
    best: tuple[float, tuple[int, ...]] | None = None
    stack: list[tuple[int, ...]] = [()]
    while stack:
        chosen = stack.pop()
        used = [0] * len(hosts)
        for pool, kind in enumerate(chosen):
            used[kind] += wanted[pool][kind] or 0
        total = sum(used)
        if any(u > t for u, t in zip(used, totals, strict=True)) or math.isinf(rest[len(chosen)]):
            continue
        if best is not None and (total + rest[len(chosen)], chosen) >= best:
            continue
        if len(chosen) == len(wanted):
            by_type = [[wanted[p][t] or 0 for p, k in enumerate(chosen) if k == t] for t in range(len(hosts))]
            if all(allocate(some, h) is not None for some, h in zip(by_type, hosts, strict=True)):
                best = (total, chosen)
            continue
        row = wanted[len(chosen)]
        kinds = sorted((t for t in range(len(hosts)) if row[t] is not None), key=lambda t: (row[t] or 0, t))
        stack.extend((*chosen, kind) for kind in reversed(kinds))
    return None if best is None else best[1]
