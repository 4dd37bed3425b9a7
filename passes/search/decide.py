"""The placement search: a problem to a decision with its runners-up, its alternatives and a certified gap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlflow.passes.search.alternatives import Alternative, alternatives
from rlflow.passes.search.bounds import Bound, gap, lower_bound
from rlflow.passes.search.candidate import Candidate
from rlflow.passes.search.partitions import Part
from rlflow.passes.search.pool_time import Misfit
from rlflow.passes.search.problem import Problem
from rlflow.passes.search.reasons import Loss, loss, misfit_text
from rlflow.passes.search.scope import Budget
from rlflow.passes.search.solver import Solver

MOST_MOVES = 10
"""How often refining may move to a better neighbour of the best candidate."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What was looked at."""

    partitions: int
    """Partitions that bounds did not rule out, counted again for every alternative."""
    joint_choices: int
    """Searches for the layouts of the stages of one pool at one size."""
    refined: int


@dataclass(frozen=True, slots=True)
class RunnerUp:
    candidate: Candidate
    loss: Loss


@dataclass(frozen=True, slots=True)
class Decision:
    chosen: Candidate
    runners_up: tuple[RunnerUp, ...]
    """The best of other partitions, best first; no plan twice."""
    alternatives: tuple[Alternative, ...]
    """Against the chosen plan, by the period of the tables (a refined plan may lose to one by that period)."""
    bound: Bound
    """From the stages alone."""
    lower_bound: float
    """The largest period that is proven unbeatable: of `bound`, and of the search where it was exact."""
    gap: float
    """Period of the chosen plan / lower bound - 1."""
    proven: bool
    """Whether nothing in the tables is better: an exact search that ended."""
    stopped_early: bool
    """Whether the time limit cut the search short."""
    effort: Effort


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing fits. `misfits` say what and by how much; none: the pins leave no partition, or no room."""

    misfits: tuple[Misfit, ...]
    message: str


def search(problem: Problem) -> Decision | Refusal:
    """The best placement within the pins.

    Without `refine` and with the fully pipelined period the result is the optimum of the tables. The same problem gives
    the same decision, unless the time limit ends the search.
    """
    budget = Budget(problem)
    solver = Solver(problem, budget)
    tables = {stage: solver.tables(stage) for stage in problem.stages}
    bound = lower_bound(tables, [kind.devices for kind in problem.device_types])
    wanted = max(1 + problem.top, problem.refine_top if problem.refine is not None else 0)
    ranked = solver.best(wanted)
    if not ranked:
        return _refusal(solver)
    proven = budget.exact and not budget.stopped_early
    # A fully pipelined period is below that of every step graph, so this holds for both objectives when refined too.
    lower = (
        max(bound.seconds, ranked[0].model_period)
        if proven
        else max(bound.seconds, _ideal_step(solver), solver.pipelined)
    )
    if problem.refine is not None:
        ranked = _refined(solver, ranked, lower)
        if not ranked:
            return Refusal((), "every candidate was refused when it was refined")
    chosen = ranked[0]
    found = alternatives(solver, chosen, ranked[1:]) if problem.alternatives else []
    return Decision(
        chosen,
        tuple(RunnerUp(other, loss(chosen, other)) for other in ranked[1 : 1 + problem.top]),
        tuple(found),
        bound,
        min(lower, chosen.period),
        gap(chosen.period, lower),
        proven and problem.refine is None,
        budget.stopped_early,
        Effort(budget.partitions, sum(times.solved for times in solver.times), budget.refined),
    )


def _ideal_step(solver: Solver) -> float:
    """The period of a step in which every stage has all devices to itself; 0 for one that is fully pipelined."""
    problem = solver.problem
    if problem.period is None or len(problem.device_types) > 1:
        return 0.0
    kind = problem.device_types[0]
    alone = [solver.times[0].ideal((i,), kind.devices) for i in range(len(problem.stages))]
    plans = [plan for plan in alone if plan is not None]
    return problem.period(plans) if len(plans) == len(alone) else 0.0


# --- refinement -------------------------------------------------------------------------------------------------------


def _refined(solver: Solver, ranked: list[Candidate], lower: float) -> list[Candidate]:
    """Ranked by better periods: of the candidates, then of the neighbours of the best while they improve."""
    problem = solver.problem
    goal = lower * (1.0 + problem.tolerance)
    known: dict[object, Candidate] = {}
    for start in range(0, len(ranked), 8):
        _measure(solver, ranked[start : start + 8], known)
        if solver.budget.spent() or _best(known).period <= goal:
            break
    for _ in range(MOST_MOVES):
        best = _best(known)
        if best.period <= goal or solver.budget.spent():
            break
        near = [a.other for a in alternatives(solver, best, ranked) if a.other is not None]
        _measure(solver, near, known)
        if _best(known).identity == best.identity:
            break
    kept = sorted((c for c in known.values() if c.period < math.inf), key=lambda c: c.key)
    distinct: dict[tuple[Part, ...], Candidate] = {}
    for candidate in kept:
        distinct.setdefault(candidate.partition, candidate)
    return list(distinct.values())


def _measure(solver: Solver, candidates: Sequence[Candidate], known: dict[object, Candidate]) -> None:
    refine = solver.problem.refine
    assert refine is not None
    fresh = list({c.identity: c for c in candidates if c.identity not in known}.values())
    if not fresh:
        return
    solver.budget.refined += len(fresh)
    for candidate, period in zip(fresh, refine(fresh), strict=True):
        known[candidate.identity] = replace(candidate, period=period)


def _best(known: dict[object, Candidate]) -> Candidate:
    return min(known.values(), key=lambda c: c.key)


# --- refusal ----------------------------------------------------------------------------------------------------------


def _refusal(solver: Solver) -> Refusal:
    """Stages that fit on no pool of their own; else what does not fit in the partition with the most pools."""
    problem = solver.problem
    alone = [m for i in range(len(problem.stages)) if (m := solver.misfit(Part((i,)))) is not None]
    if alone:
        return Refusal(tuple(alone), "; ".join(misfit_text(m) for m in alone))
    widest = max(solver.every_partition(), key=len, default=None)
    if widest is None:
        return Refusal((), "the pins leave no way to put the stages on pools")
    shared = [m for part in widest if (m := solver.misfit(part)) is not None]
    if shared:
        return Refusal(tuple(shared), "; ".join(misfit_text(m) for m in shared))
    have = " + ".join(f"{kind.devices} of `{kind.name}`" for kind in problem.device_types)
    return Refusal((), f"{len(widest)} pools find no room on the devices there are: {have}")
