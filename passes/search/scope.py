"""How far a search may go: in time, and in the space of plans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlflow.passes.search.partitions import Part, Partition
from rlflow.passes.search.problem import Problem

Range = tuple[int, int | None]
"""Least and most devices of a pool (None: no limit)."""


class Budget:
    """Counts, and the time at which to stop."""

    def __init__(self, problem: Problem) -> None:
        self._clock = problem.clock
        self._end = math.inf if problem.time_limit is None else problem.clock() + problem.time_limit
        self.partitions = 0
        self.refined = 0
        self.stopped_early = False
        self.exact = True
        """False once local search answered, or partitions were left out."""

    def spent(self) -> bool:
        if self._end < math.inf and self._clock() >= self._end:
            self.stopped_early = True
        return self.stopped_early


@dataclass(frozen=True, slots=True)
class Scope:
    """The part of the space to search."""

    ranges: Mapping[Part, Range] = field(default_factory=dict)
    """Pools whose sizes are limited."""
    fixed: Part | None = None
    """A pool that must be there."""
    pools: int | None = None
    """How many pools there must be."""
    other_than: Partition | None = None

    def allows(self, partition: Partition) -> bool:
        if self.fixed is not None and self.fixed not in partition:
            return False
        return partition != self.other_than and self.pools in (None, len(partition))

    def may_grow(self, parts: Sequence[Part], stages: int) -> bool:
        """Whether the first stages, put on pools like this, can become an allowed partition of so many stages."""
        if self.pools is not None:
            left = stages - sum(len(part.stages) for part in parts)
            if not len(parts) <= self.pools <= len(parts) + left:
                return False
        if self.fixed is not None:
            inside = set(self.fixed.stages)
            touched = [part for part in parts if not inside.isdisjoint(part.stages)]
            return len(touched) <= 1 and all(inside.issuperset(part.stages) for part in touched)
        return True


EVERYTHING = Scope()
