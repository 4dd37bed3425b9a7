"""The best candidate of one partition, and the best partitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from rlflow.passes.search.bisection import Least, least_period, sizing_at
from rlflow.passes.search.candidate import Candidate, PlacedPool
from rlflow.passes.search.devices import allocate, assign
from rlflow.passes.search.options import StageTable
from rlflow.passes.search.partitions import Part, Partition, partitions
from rlflow.passes.search.pool_time import Floor, Misfit, PoolPlan, PoolTimes
from rlflow.passes.search.problem import PoolPin, Problem
from rlflow.passes.search.scope import EVERYTHING, Budget, Range, Scope
from rlflow.passes.search.setup import rules_of, times_of
from rlflow.passes.search.sizing import Found, PoolChoice, exhaustive, local_search
from rlflow.passes.search.states import SLACK
from rlflow.passes.search.synchronous import PeriodModel

MOST_SIZINGS = 20_000
"""Sizings of one partition up to which a period of all pools together is searched exhaustively."""
LOCAL_PARTITIONS = 50
"""Partitions that local search looks into: those that are best when fully pipelined."""


class Solver:
    """Answers for one problem, or for the same with other options for one stage (`with_tables`)."""

    def __init__(self, problem: Problem, budget: Budget, times: Sequence[PoolTimes] | None = None) -> None:
        self.problem = problem
        self.budget = budget
        self.times: tuple[PoolTimes, ...] = tuple(times) if times is not None else times_of(problem)
        self.pipelined = 0.0
        """The least fully pipelined period, once local search has begun with it: a lower bound of every other."""
        self._hosts = [kind.hosts for kind in problem.device_types]
        self._pins = {pool.name: pool for pool in problem.pins.pools}
        self._fit = partial(assign, hosts=self._hosts)

    def with_tables(self, stage: str, tables: Sequence[StageTable | None]) -> Solver:
        """`tables` by device type."""
        position = self.problem.stages.index(stage)
        times = [t.with_table(position, table) for t, table in zip(self.times, tables, strict=True)]
        return Solver(self.problem, self.budget, times)

    def tables(self, stage: str) -> tuple[StageTable | None, ...]:
        """Of one stage, by device type, as far as pins allow."""
        position = self.problem.stages.index(stage)
        return tuple(times.tables[position] for times in self.times)

    # --- partitions ---------------------------------------------------------------------------------------------------

    def best(self, top: int, scope: Scope = EVERYTHING, first: Partition | None = None) -> list[Candidate]:
        """The best `top` candidates, one for each partition, best first. `first` is a partition that is likely good."""
        if self.problem.period is not None and not self._small():
            return self._best_locally(top, scope, self.problem.period)
        return self._best(top, scope, self.candidate, first)

    def _best(
        self,
        top: int,
        scope: Scope,
        solve: Callable[[Partition, float, Scope], Candidate | None],
        first: Partition | None = None,
    ) -> list[Candidate]:
        found: list[Candidate] = []

        def limit() -> float:
            return found[-1].period if len(found) >= top else math.inf

        def add(partition: Partition) -> None:
            self.budget.partitions += 1
            candidate = solve(partition, limit(), scope)
            if candidate is not None:
                found.append(candidate)
                found.sort(key=lambda c: c.key)
                del found[top:]

        if first is not None:
            add(first)
        # Many pools first: small pools are solved quickly, and rule out most of the large ones.
        counts = range(len(self.problem.stages), 0, -1) if scope.pools is None else (scope.pools,)
        for partition in (p for n in counts for p in self.every_partition(replace(scope, pools=n), limit)):
            if found and self.budget.spent():
                break
            if partition != first:
                add(partition)
        return found

    def _best_locally(self, top: int, scope: Scope, period: PeriodModel) -> list[Candidate]:
        """Local search in the partitions that are best when fully pipelined, and in the one with the fewest pools."""
        pipelined = self._best(LOCAL_PARTITIONS, scope, self._pipelined)
        if scope is EVERYTHING and pipelined and not self.budget.stopped_early:
            self.pipelined = pipelined[0].period
        fewest = self.fewest_pools(scope)
        start = None if fewest is None else self._pipelined(fewest, math.inf, scope)
        if start is not None and all(c.partition != start.partition for c in pipelined):
            pipelined.insert(0, start)
        found: list[Candidate] = []
        for begin in pipelined:
            if found and self.budget.spent():
                break
            if len(found) >= top and begin.period > found[-1].period * (1.0 + SLACK):
                continue
            candidate = self._sized(begin.partition, math.inf, scope, period, begin)
            if candidate is not None:
                found.append(candidate)
                found.sort(key=lambda c: c.key)
                del found[top:]
        if len(pipelined) >= LOCAL_PARTITIONS and (not found or pipelined[-1].period < found[-1].period):
            self.budget.exact = False  # a partition that was left out might be better
        return found

    def every_partition(
        self, scope: Scope = EVERYTHING, limit: Callable[[], float] | None = None
    ) -> Iterator[Partition]:
        """The partitions in scope; with `limit` without those that cannot have a period of at most its value."""
        stages = len(self.problem.stages)

        def prune(parts: Sequence[Part]) -> bool:
            if not scope.may_grow(parts, stages):
                return True
            return limit is not None and not self.possible(parts, limit())

        return (p for p in partitions(stages, rules_of(self.problem), prune) if scope.allows(p))

    def fewest_pools(self, scope: Scope = EVERYTHING) -> Partition | None:
        """The first partition with as few pools as the pins allow."""
        for pools in range(1, len(self.problem.stages) + 1):
            found = next(self.every_partition(replace(scope, pools=pools)), None) if scope.pools is None else None
            if found is not None:
                return found
        return next(self.every_partition(scope), None)

    def possible(self, parts: Sequence[Part], limit: float) -> bool:
        """False only if no plan with these stages on these pools, and maybe more, has a period of at most `limit`."""
        wanted: list[list[int | None]] = []
        bound = limit if self.problem.period is None else limit * (1.0 + SLACK)
        for part in parts:
            pin = self._pin(part)
            row: list[int | None] = []
            for number, times in enumerate(self.times):
                floor = times.least_floor(part.stages, bound) if self._may(pin, number) else None
                pinned = None if pin is None else pin.devices
                row.append(None if floor is None else pinned or floor.devices)
            if all(size is None for size in row):
                return False
            wanted.append(row)
        return self._fit(wanted) is not None

    # --- one partition ------------------------------------------------------------------------------------------------

    def candidate(self, partition: Partition, upper: float, scope: Scope = EVERYTHING) -> Candidate | None:
        """The best candidate with this partition and a period of at most `upper`; None when there is none."""
        if self.problem.period is None:
            return self._pipelined(partition, upper, scope)
        start = self._pipelined(partition, upper * (1.0 + SLACK), scope)
        return None if start is None else self._sized(partition, upper, scope, self.problem.period, start)

    def _pipelined(self, partition: Partition, upper: float, scope: Scope) -> Candidate | None:
        """By bisection, first over the floors of the pools: that period is a bound, and mostly close."""
        floors: list[list[Least[Floor]]] = []
        pools: list[list[Least[PoolPlan]]] = []
        for part in partition:
            low, high = self._range(part, scope)
            times = [t if self._may(self._pin(part), number) else None for number, t in enumerate(self.times)]
            ask = [None if t is None else (t.least_floor, t.least) for t in times]
            floors.append([_never if a is None else partial(a[0], part.stages, low=low, high=high) for a in ask])
            pools.append([_never if a is None else partial(a[1], part.stages, low=low, high=high) for a in ask])
        if len(partition) == 1:
            # A pool alone is fastest on all there is; the question left is how few devices are as fast.
            fastest = self._fastest(partition[0], upper, scope)
            found = None if fastest is None else sizing_at(pools, self._fit, fastest)
        else:
            bound = least_period(floors, self._fit, upper)
            found = None if bound is None else least_period(pools, self._fit, upper, bound.period)
        return None if found is None else self._placed(partition, found.plans, found.kinds, found.period)

    def _fastest(self, part: Part, upper: float, scope: Scope) -> float | None:
        """The least time of a pool that has all devices its range allows, if at most `upper`."""
        low, high = self._range(part, scope)
        found: list[float] = []
        for number, times in enumerate(self.times):
            sizes = [low] if low == high else [n for n in times.sizes if low <= n and (high is None or n <= high)]
            if sizes and sizes[-1] <= self._total(number) and self._may(self._pin(part), number):
                plan = times.at_most(part.stages, sizes[-1], upper)
                found += [] if plan is None else [plan.seconds]
        return min(found, default=None)

    def _sized(
        self, partition: Partition, upper: float, scope: Scope, period: PeriodModel, start: Candidate
    ) -> Candidate | None:
        """The sizes of the pools when the period depends on all of them."""
        options = [self._choices(part, scope) for part in partition]

        def plans(choices: Sequence[PoolChoice], ideal: bool) -> list[PoolPlan] | None:
            ask = [self.times[c.kind].ideal if ideal else self.times[c.kind].at_most for c in choices]
            made = [f(part.stages, c.devices) for f, part, c in zip(ask, partition, choices, strict=True)]
            return [plan for plan in made if plan is not None] if all(made) else None

        def evaluate(choices: tuple[PoolChoice, ...]) -> float:
            made = plans(choices, ideal=False)
            return math.inf if made is None else period(made)

        def floor(choices: tuple[PoolChoice, ...]) -> float:
            made = plans(choices, ideal=True)
            return math.inf if made is None else period(made) * (1.0 - SLACK)

        def room(choices: Sequence[PoolChoice]) -> bool:
            by_kind: list[list[int]] = [[] for _ in self._hosts]
            for choice in choices:
                by_kind[choice.kind].append(choice.devices)
            return all(allocate(sizes, hosts) is not None for sizes, hosts in zip(by_kind, self._hosts, strict=True))

        found: Found | None
        if math.prod(len(some) for some in options) <= MOST_SIZINGS:
            found = exhaustive(options, room, evaluate, floor, upper)
        else:
            self.budget.exact = False
            kinds = [kind.name for kind in self.problem.device_types]
            begin = tuple(PoolChoice(pool.devices, kinds.index(pool.device_type)) for pool in start.pools)
            even = tuple(
                max(
                    (o for o in some if o.kind == c.kind and o.devices * len(options) <= self._total(c.kind)), default=c
                )
                for some, c in zip(options, begin, strict=True)
            )
            found = local_search(options, room, evaluate, [begin, even], self.budget.spent)
        if found is None or found.period > upper:
            return None
        made = plans(found.choices, ideal=False)
        assert made is not None
        return self._placed(partition, made, [choice.kind for choice in found.choices], found.period)

    def _placed(
        self, partition: Partition, plans: Sequence[PoolPlan], kinds: Sequence[int], period: float
    ) -> Candidate:
        placed: dict[int, PlacedPool] = {}
        for number, kind in enumerate(self.problem.device_types):
            mine = [i for i, k in enumerate(kinds) if k == number]
            found = allocate([plans[i].devices for i in mine], kind.hosts)
            assert found is not None
            for i, where in zip(mine, found, strict=True):
                placed[i] = PlacedPool(partition[i].pool, partition[i], kind.name, plans[i], where)
        return Candidate(tuple(placed[i] for i in range(len(plans))), period, period)

    # --- pins ---------------------------------------------------------------------------------------------------------

    def _pin(self, part: Part) -> PoolPin | None:
        return None if part.pool is None else self._pins[part.pool]

    def _total(self, kind: int) -> int:
        return self.problem.device_types[kind].devices

    def _may(self, pin: PoolPin | None, kind: int) -> bool:
        wanted = None if pin is None else pin.device_type
        return wanted is None or wanted == self.problem.device_types[kind].name

    def _range(self, part: Part, scope: Scope) -> Range:
        pin = self._pin(part)
        if pin is not None and pin.devices is not None:
            return pin.devices, pin.devices
        return scope.ranges.get(part, (1, None))

    def _choices(self, part: Part, scope: Scope) -> list[PoolChoice]:
        low, high = self._range(part, scope)
        found: list[PoolChoice] = []
        for number, times in enumerate(self.times):
            if self._may(self._pin(part), number):
                sizes = (low,) if low == high else times.sizes
                found += [PoolChoice(n, number) for n in sizes if low <= n and (high is None or n <= high)]
        return sorted(c for c in found if self.times[c.kind].ideal(part.stages, c.devices) is not None)

    def _small(self) -> bool:
        """Whether every partition can be searched exhaustively."""
        sizes = sum(len(times.sizes) for times in self.times)
        return math.prod([sizes] * len(self.problem.stages)) <= MOST_SIZINGS

    def misfit(self, part: Part, devices: int | None = None) -> Misfit | None:
        """Why these stages cannot share a pool, on the device type where they come closest; None when they can."""
        pin = self._pin(part)
        found: Misfit | None = None
        for number, (times, kind) in enumerate(zip(self.times, self.problem.device_types, strict=True)):
            if not self._may(pin, number):
                continue
            size = devices or (pin.devices if pin is not None and pin.devices is not None else kind.devices)
            reason = times.misfit(part.stages, min(size, kind.devices))
            if reason is None:
                return None
            if found is None or (reason.needed_bytes or math.inf) < (found.needed_bytes or math.inf):
                found = reason
        return found


def _never(limit: float) -> None:
    return None
