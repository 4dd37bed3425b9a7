"""The time T_P(n) of a pool of n devices that its stages share, with the choice behind it.

Values are found when asked for and kept. Most questions are "is T_P(n) at most x?": the sum of the stages' own least
times answers them with no when it exceeds x, and bounds the search for the joint choice otherwise.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from rlflow.passes.search.joint import Load, Swap, best_joint, least_load, load_of
from rlflow.passes.search.options import COSTS, StageOption, StageTable

Block = tuple[int, ...]
"""Stages that share a pool: positions in step order, increasing."""

Reshard = Callable[[str, Hashable, str, Hashable], float]
"""Seconds to get from one stage in a layout class to another stage in its class, on the devices of one pool."""

Links = Callable[[tuple[str, ...]], Sequence[tuple[int, int]]]
"""Of the stages of a pool in step order, the pairs (from, to) of positions between which a reshard runs. A pair (i, i)
is weights of stage i that come from a stage of another pool."""


def no_reshard(source: str, source_class: Hashable, target: str, target_class: Hashable) -> float:
    return 0.0


def consecutive(stages: tuple[str, ...]) -> list[tuple[int, int]]:
    """From every stage to the next, and from the last to the first of the next period."""
    count = len(stages)
    return [] if count < 2 else [(i, (i + 1) % count) for i in range(count)]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The stages of a pool on `devices` devices, run in turn."""

    stages: tuple[str, ...]
    devices: int
    seconds: float
    """T_P: stages, reshards and swap of one period."""
    choices: tuple[StageOption, ...]
    reshard_seconds: tuple[float, ...]
    """Before each stage."""
    swap_seconds: float
    load: Load

    @property
    def layouts(self) -> tuple[Hashable, ...]:
        return tuple(option.layout for option in self.choices)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why stages do not run on so many devices."""

    stages: tuple[str, ...]
    devices: int
    stage: str
    """The one that peaks, or that has no layout for so few devices."""
    needed_bytes: int | None
    """The least that any choice of layouts needs on the fullest device; None: no layout needs so few devices."""
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Floor:
    """A size, and seconds that a pool of that size cannot beat."""

    devices: int
    seconds: float


class PoolTimes:
    """T_P(n) of every set of stages on devices of one type. Not thread-safe; grows with what is asked."""

    def __init__(
        self,
        stages: Sequence[str],
        tables: Sequence[StageTable | None],
        sizes: Sequence[int],
        swap: Swap,
        reshard: Reshard = no_reshard,
        links: Links = consecutive,
    ) -> None:
        """`tables` by position of the stage, None where it cannot run on this type; `sizes` of pools, increasing."""
        self.stages = tuple(stages)
        self.tables = tuple(tables)
        self.sizes = tuple(sizes)
        self._solved = [0]
        self._swap, self._reshard, self._links = swap, reshard, links
        self._floors: dict[Block, list[float]] = {}
        self._plans: dict[tuple[Block, int], PoolPlan] = {}
        self._above: dict[tuple[Block, int], float] = {}
        self._moved: dict[tuple[str, Hashable, str, Hashable], float] = {}
        self._options: dict[tuple[int, int], tuple[StageOption, ...]] = {}
        self._parent: PoolTimes | None = None
        self._changed = -1

    def with_table(self, position: int, table: StageTable | None) -> PoolTimes:
        """The same with other options for one stage. Sets without that stage keep what is known."""
        tables = (*self.tables[:position], table, *self.tables[position + 1 :])
        child = PoolTimes(self.stages, tables, self.sizes, self._swap, self._reshard, self._links)
        child._parent, child._changed = self, position
        child._moved, child._solved = self._moved, self._solved
        return child

    @property
    def solved(self) -> int:
        """How many joint choices were searched, here and in what `with_table` made."""
        return self._solved[0]

    def floor(self, block: Block) -> list[float]:
        """Minus the sum of the stages' own least times, for every size: a sequence that never decreases."""
        if self._parent is not None and self._changed not in block:
            return self._parent.floor(block)
        found = self._floors.get(block)
        if found is None:
            if len(block) == 1:
                table = self.tables[block[0]]
                own = [math.inf] * len(self.sizes) if table is None else table.envelope(self.sizes)
                found = [-time for time in own]
            else:
                # Summed in step order, as the time of a pool is, so that rounding cannot lift a bound above it.
                found = [a + b for a, b in zip(self.floor(block[:-1]), self.floor(block[-1:]), strict=True)]
            self._floors[block] = found
        return found

    def least_floor(self, block: Block, limit: float, low: int = 1, high: int | None = None) -> Floor | None:
        """The smallest size in [low, high] that the stages' own times allow for `limit`: at most the one of `least`."""
        if low == high:
            ideal = self.ideal(block, low)
            return None if ideal is None or ideal.seconds > limit else Floor(low, ideal.seconds)
        first = self._first(block, limit, low)
        if first == len(self.sizes) or (high is not None and self.sizes[first] > high):
            return None
        return Floor(self.sizes[first], -self.floor(block)[first])

    def at_most(self, block: Block, devices: int, limit: float = math.inf) -> PoolPlan | None:
        """The best plan on so many devices if its time is at most `limit`, else None."""
        if self._parent is not None and self._changed not in block:
            return self._parent.at_most(block, devices, limit)
        key = block, devices
        plan = self._plans.get(key)
        if plan is not None:
            return plan if plan.seconds <= limit else None
        if limit <= self._above.get(key, -1.0):
            return None
        plan = self._solve(block, devices, limit)
        if plan is None:
            self._above[key] = limit
        else:
            self._plans[key] = plan
        return plan

    def least(self, block: Block, limit: float, low: int = 1, high: int | None = None) -> PoolPlan | None:
        """The plan on the smallest size in [low, high] with a time of at most `limit`; None when there is none.

        Gallops up from the bound of `least_size`, then bisects: T_P never increases with the size.
        """
        if low == high:  # a pinned size need not be one of `sizes`
            return self.at_most(block, low, limit)
        first = self._first(block, limit, low)
        end = len(self.sizes) if high is None else bisect_right(self.sizes, high)
        bad, step = first - 1, 1
        while True:
            index = min(bad + step, end - 1)
            if index <= bad:
                return None
            plan = self.at_most(block, self.sizes[index], limit)
            if plan is not None:
                break
            bad, step = index, 2 * step
        while index - bad > 1:
            middle = (bad + index) // 2
            better = self.at_most(block, self.sizes[middle], limit)
            if better is None:
                bad = middle
            else:
                index, plan = middle, better
        return plan

    def ideal(self, block: Block, devices: int) -> PoolPlan | None:
        """Every stage at its own least time, without reshard and swap: nothing on so many devices is faster."""
        options = [self._options_at(i, devices) for i in block]
        if not all(options):
            return None
        choices = tuple(min(some, key=COSTS) for some in options)
        names = tuple(self.stages[i] for i in block)
        seconds = sum(option.seconds for option in choices)
        return PoolPlan(names, devices, seconds, choices, (0.0,) * len(block), 0.0, load_of(choices))

    def misfit(self, block: Block, devices: int) -> Misfit | None:
        """Why the stages cannot share so many devices; None when they can."""
        names = tuple(self.stages[i] for i in block)
        worst: Misfit | None = None
        for i in block:
            table = self.tables[i]
            if table is None or not self._options_at(i, devices):
                large = [] if table is None else [o for o in table.too_large if o.devices <= devices]
                needed = min((option.peak_bytes for option in large), default=None)
                limit = 0 if table is None else table.limit_bytes
                if worst is None or (needed or 0) > (worst.needed_bytes or 0):
                    worst = Misfit(names, devices, self.stages[i], needed, limit)
        if worst is not None:
            return worst
        if self.at_most(block, devices) is not None:
            return None
        found = least_load([self._options_at(i, devices) for i in block])
        assert found is not None
        load, peak = found
        table = self.tables[block[peak]]
        assert table is not None
        return Misfit(names, devices, self.stages[block[peak]], load.peak_bytes, table.limit_bytes)

    def _first(self, block: Block, limit: float, low: int) -> int:
        """Index of the first size from `low` on that the sum of least times does not rule out."""
        floor = self.floor(block)
        index = bisect_left(floor, -limit) if limit < math.inf else bisect_right(floor, -math.inf)
        return max(index, bisect_left(self.sizes, low))

    def _options_at(self, position: int, devices: int) -> tuple[StageOption, ...]:
        if self._parent is not None and self._changed != position:
            return self._parent._options_at(position, devices)
        key = position, devices
        found = self._options.get(key)
        if found is None:
            table = self.tables[position]
            found = self._options[key] = () if table is None else table.options(devices)
        return found

    def _solve(self, block: Block, devices: int, limit: float) -> PoolPlan | None:
        self._solved[0] += 1
        names = tuple(self.stages[i] for i in block)

        def moved(a: int, class_a: Hashable, b: int, class_b: Hashable) -> float:
            key = names[a], class_a, names[b], class_b
            seconds = self._moved.get(key)
            if seconds is None:
                seconds = self._moved[key] = self._reshard(*key)
            return seconds

        options = [self._options_at(i, devices) for i in block]
        joint = best_joint(options, self._links(names), moved, self._swap, limit)
        if joint is None:
            return None
        return PoolPlan(
            names, devices, joint.seconds, joint.choices, joint.reshard_seconds, joint.swap_seconds, joint.load
        )
