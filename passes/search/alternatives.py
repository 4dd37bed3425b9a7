"""For every decision of a plan the best plan with that decision changed and everything else optimised again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from rlflow.passes.search.candidate import Candidate, PlacedPool
from rlflow.passes.search.partitions import Partition
from rlflow.passes.search.pool_time import Misfit
from rlflow.passes.search.reasons import Loss, loss, misfit_text
from rlflow.passes.search.scope import Range, Scope
from rlflow.passes.search.solver import Solver


class DecisionKind(StrEnum):
    """What is changed."""

    PARTITION = "partition"
    """Which stages share a pool: the best of all others."""
    COLOCATED = "colocated"
    """All stages on one pool."""
    DISAGGREGATED = "disaggregated"
    """Every stage on a pool of its own."""
    LAYOUT = "layout"
    """A stage in another layout class."""
    FEWER = "fewer devices"
    """A pool of the same stages with fewer devices."""
    MORE = "more devices"
    """A pool of the same stages with more devices."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """`other` is None when nothing fits or is legal; `misfit` then says what does not fit, where memory decides."""

    kind: DecisionKind
    subject: tuple[str, ...]
    """The stage or the pool's stages; empty for a partition."""
    other: Candidate | None
    loss: Loss | None
    misfit: Misfit | None = None

    @property
    def reason(self) -> str:
        """Why the chosen plan was preferred, in one line."""
        if self.loss is not None:
            return str(self.loss)
        if self.misfit is not None:
            return misfit_text(self.misfit)
        return "nothing else is legal"


def alternatives(solver: Solver, chosen: Candidate, others: list[Candidate]) -> list[Alternative]:
    """All that are not pinned, in a fixed order. `others` are the best of other partitions, best first.

    Stops early, with those found so far, when the budget is spent.
    """
    found: list[Alternative] = []
    chosen = replace(chosen, period=chosen.model_period)
    for alternative in _each(solver, chosen, [replace(other, period=other.model_period) for other in others]):
        found.append(alternative)
        if solver.budget.spent():
            break
    return found


def _each(solver: Solver, chosen: Candidate, others: list[Candidate]) -> Iterator[Alternative]:
    other_than = Scope(other_than=chosen.partition)
    another = next(solver.every_partition(other_than), None)
    if another is not None:
        other = next((c for c in others if c.partition != chosen.partition), None) or _best(solver, other_than)
        yield _made(DecisionKind.PARTITION, (), chosen, other, None if other else _misfit(solver, another))
    for kind, pools in ((DecisionKind.COLOCATED, 1), (DecisionKind.DISAGGREGATED, len(solver.problem.stages))):
        scope = Scope(pools=pools)
        same = next(solver.every_partition(scope), None)
        if len(chosen.pools) != pools and same is not None:
            other = _best(solver, scope, same)
            yield _made(kind, (), chosen, other, None if other else _misfit(solver, same))
    for stage in solver.problem.stages:
        yield _other_layout(solver, chosen, stage)
    for pool in chosen.pools:
        yield from _other_sizes(solver, chosen, pool)


def _other_layout(solver: Solver, chosen: Candidate, stage: str) -> Alternative:
    banned = chosen.option_of(stage).layout_class
    pool = chosen.pool_of(stage)
    tables = [None if table is None else table.without_class(banned) for table in solver.tables(stage)]
    changed = solver.with_tables(stage, tables)
    other = _best(changed, Scope(), chosen.partition) if any(t is not None and t.classes for t in tables) else None
    misfit = None
    if other is None and any(t is not None and t.given for t in tables):
        misfit = changed.misfit(pool.part, pool.devices)
    return _made(DecisionKind.LAYOUT, (stage,), chosen, other, misfit)


def _other_sizes(solver: Solver, chosen: Candidate, pool: PlacedPool) -> Iterator[Alternative]:
    pin = next((p for p in solver.problem.pins.pools if p.name == pool.name), None)
    if pin is not None and pin.devices is not None:
        return
    ranges: Mapping[DecisionKind, Range] = {
        DecisionKind.FEWER: (1, pool.devices - 1),
        DecisionKind.MORE: (pool.devices + 1, None),
    }
    most = max(kind.devices for kind in solver.problem.device_types)
    for kind, (low, high) in ranges.items():
        if (high is not None and high < low) or low > most:
            continue
        other = _best(solver, Scope({pool.part: (low, high)}, fixed=pool.part), chosen.partition)
        misfit = solver.misfit(pool.part, high) if other is None and high is not None else None
        yield _made(kind, pool.stages, chosen, other, misfit)


def _best(solver: Solver, scope: Scope, first: Partition | None = None) -> Candidate | None:
    return next(iter(solver.best(1, scope, first)), None)


def _made(
    kind: DecisionKind, subject: tuple[str, ...], chosen: Candidate, other: Candidate | None, misfit: Misfit | None
) -> Alternative:
    return Alternative(kind, subject, other, None if other is None else loss(chosen, other), misfit)


def _misfit(solver: Solver, partition: Partition) -> Misfit | None:
    return next((m for part in partition if (m := solver.misfit(part)) is not None), None)
