"""search-placement: pools, placements and layouts that the schedule leaves open, by the least period of a step."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf
from typing import TYPE_CHECKING, ClassVar

from rlflow.cluster.spec import LOCAL, PlaceRequest, PoolRequest, Schedule, StalenessRequest
from rlflow.diagnostics import CompileError, Diagnostic, Span
from rlflow.ir.decisions import Cadence, Choice, SearchSummary
from rlflow.ir.flow import Flow, Layout, Stage, reads_model
from rlflow.ir.ops import Generate, Train
from rlflow.passes.base import Pass, PassContext
from rlflow.values import dataclass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlflow.passes.analysis.placement_problem import Setting
    from rlflow.passes.search.alternatives import Alternative
    from rlflow.passes.search.candidate import Candidate, PlacedPool
    from rlflow.passes.search.decide import Decision

MOST_STALENESS = 3
"""Of what a flow permits, unless the schedule asks for more."""


@dataclass(frozen=True, slots=True)
class SearchPlacement(Pass):
    """Fill in what `auto` leaves open: which stages share a pool, the pools' sizes, the layout of every stage.

    What is pinned stays. The answer is written into the schedule as if the user had pinned it, so that every later pass
    checks it like any other; the runners-up and by how much they lose are kept. Staleness is used as far as the flow
    permits it and it shortens the step. On this machine, on CPUs and with models that are not known before they are
    loaded there is nothing to weigh, and one pool of a host is the default.
    """

    name: ClassVar[str] = "search-placement"
    requires: ClassVar[Stage] = Stage.LOGICAL
    ensures: ClassVar[Stage] = Stage.LOGICAL

    def run(self, flow: Flow, context: PassContext) -> Flow:
        cluster = context.cluster
        if not context.schedule.auto or cluster.name == LOCAL or any(h.device == "cpu" for h in cluster.hosts):
            return flow
        from rlflow.passes.analysis.placement_problem import placement_problem
        from rlflow.passes.search.decide import Refusal, search

        setting = placement_problem(flow, context)
        if isinstance(setting, str):
            return flow
        refused: list[Diagnostic] = []
        refined = replace(setting.problem, refine=lambda some: _periods(flow, some, setting, context, refused))
        found = search(refined)
        if isinstance(found, Refusal) and refused:
            context.diagnostics += refused  # of the best candidate: what no placement would mend
            return flow
        if isinstance(found, Refusal):
            context.error(
                "RLF2008",
                f"no placement on cluster `{cluster.name}` fits",
                context.schedule.span or flow.span,
                notes=tuple(found.message.split("; "))[:4],
                help=("more devices, or fewer pins",),
            )
            return flow
        context.schedule = _schedule(flow, found.chosen, setting, context)
        return replace(flow, decisions=(*flow.decisions, *_choices(flow, found, context)))


def _periods(
    flow: Flow, candidates: Sequence[Candidate], setting: Setting, context: PassContext, refused: list[Diagnostic]
) -> list[float]:
    """The steady state of each candidate, with its real reshards, swaps and queues: the passes that follow, run on it.

    Infinite for one that a later pass refuses; `refused` gets what was said of the first of them.
    """
    from rlflow.passes.pipeline import DEFAULT_PIPELINE, run_pipeline

    after = DEFAULT_PIPELINE[DEFAULT_PIPELINE.index(SearchPlacement.name) + 1 :]
    found = []
    for candidate in candidates:
        schedule = _schedule(flow, candidate, setting, context)
        trial = PassContext(schedule, context.cluster, [], context.shapes, context.architectures, context.profile)
        try:
            whole = run_pipeline(flow, trial, after)
        except CompileError as error:
            if not refused:
                refused += error.diagnostics
            found.append(inf)
            continue
        cadences = whole.decided(Cadence)
        found.append(cadences[0].us / 1e6 if cadences else candidate.model_period)
    return found


def _schedule(flow: Flow, chosen: Candidate, setting: Setting, context: PassContext) -> Schedule:
    """The schedule with the answer pinned."""
    old = context.schedule
    names = _pool_names(flow, chosen)
    pools = tuple(
        PoolRequest(
            names[pool.part],
            pool.devices,
            next((request.span for request in old.pools if request.name == names[pool.part]), old.span or flow.span),
            pool.device_type,
            next((request.memory_bytes for request in old.pools if request.name == names[pool.part]), None),
            next((request.swap for request in old.pools if request.name == names[pool.part]), True),
            _hosts(pool, setting),
        )
        for pool in chosen.pools
    )
    places = [place for place in old.places if place.pool == "cpu"]
    pinned = context.pins(flow)
    for pool in chosen.pools:
        for stage in pool.stages:
            places.append(_place(stage, names[pool.part], _layout(chosen, stage), pinned.get(stage), flow))
    staleness = old.staleness
    if not staleness and setting.pipelined and len(chosen.pools) > 1:
        staleness = _staleness(flow, chosen)
    return replace(old, pools=pools, places=tuple(places), staleness=staleness)


def _place(stage: str, pool: str, layout: Layout, pin: PlaceRequest | None, flow: Flow) -> PlaceRequest:
    trains = isinstance(flow.nodes[stage].op, Train)
    return PlaceRequest(
        (stage,),
        pool,
        () if pin is None else pin.also,
        tp=layout.tp,
        pp=layout.pp,
        dp=None if pin is not None and pin.also else layout.dp,  # what is left of each of several pools
        ep=layout.ep,
        cp=layout.cp,
        etp=layout.etp if layout.ep > 1 or layout.etp > 1 or layout.tp > 1 else None,
        vp=layout.vp,
        split=layout.split or None,
        sp=layout.sp if trains else None,
        zero=layout.zero if trains else None,
        recompute=layout.recompute if trains else None,
        reshard=None if pin is None else pin.reshard,
        span=flow.nodes[stage].span if pin is None else pin.span,
        settings={} if pin is None else pin.settings,
    )


def _staleness(flow: Flow, chosen: Candidate) -> tuple[StalenessRequest, ...]:
    """As much as lets all pools work at once: the sum of their times over the largest, rounded up, less one."""
    times = [pool.plan.seconds for pool in chosen.pools]
    useful = ceil(sum(times) / max(times) - 1e-9) - 1 if max(times) > 0 else 0
    found = []
    for model, permitted in flow.allowed_staleness.items():
        sampled = [n.id for n in flow.nodes.values() if isinstance(n.op, Generate) and n.op.model == model]
        trained = [n.id for n in flow.nodes.values() if isinstance(n.op, Train) and n.op.model == model]
        steps = min(permitted, useful, MOST_STALENESS)
        apart = any(chosen.pool_of(a) is not chosen.pool_of(b) for a in sampled[:1] for b in trained[:1])
        if steps > 0 and apart:
            found.append(StalenessRequest(model, steps, "in_order", flow.nodes[sampled[0]].span))
    return tuple(found)


def _pool_names(flow: Flow, chosen: Candidate) -> dict[object, str]:
    """Names of pools: the declared ones; of others what they do."""
    if len(chosen.pools) == 1 and chosen.pools[0].name is None:
        return {chosen.pools[0].part: "main"}
    names: dict[object, str] = {}
    taken: set[str] = {pool.name for pool in chosen.pools if pool.name is not None}
    for pool in chosen.pools:
        name = pool.name
        if name is None:
            ops = [flow.nodes[stage].op for stage in pool.stages]
            name = "rollout" if any(isinstance(op, Generate) for op in ops) else str(reads_model(ops[0]))
            name = "learner" if any(isinstance(op, Train) for op in ops) and name != "rollout" else name
            base, number = name, 2
            while name in taken:
                name, number = f"{base}_{number}", number + 1
            taken.add(name)
        names[pool.part] = name
    return names


def _hosts(pool: PlacedPool, setting: Setting) -> tuple[str, ...]:
    """The host of every rank."""
    from rlflow.passes.search.devices import slots

    kind = next(kind for kind in setting.problem.device_types if kind.name == pool.device_type)
    names = setting.hosts[pool.device_type]
    return tuple(names[host] for host, _, count in slots(pool.start, pool.devices, kind.hosts) for _ in range(count))


def _layout(chosen: Candidate, stage: str) -> Layout:
    from rlflow.passes.search.layout_space import LayoutChoice

    choice = chosen.option_of(stage).layout
    assert isinstance(choice, LayoutChoice)
    return choice.layout


# --- what is kept of the search ---------------------------------------------------------------------------------------


def _choices(flow: Flow, found: Decision, context: PassContext) -> list[Choice | SearchSummary]:
    span = context.schedule.span or flow.span
    summary = SearchSummary(
        us=round(found.chosen.period * 1e6),
        lower_bound_us=round(found.lower_bound * 1e6),
        gap=round(found.gap, 6),
        proven=found.proven,
        stopped_early=found.stopped_early,
        partitions=found.effort.partitions,
        joint_choices=found.effort.joint_choices,
        runners_up=tuple((_pools_text(flow, r.candidate), str(r.loss)) for r in found.runners_up),
        span=span,
    )
    return [summary, *(_choice(flow, found.chosen, alternative, span) for alternative in found.alternatives)]


def _choice(flow: Flow, chosen: Candidate, alternative: Alternative, span: Span | None) -> Choice:
    from rlflow.passes.search.alternatives import DecisionKind

    names = _pool_names(flow, chosen)
    kind, subject = alternative.kind, alternative.subject
    other = alternative.other
    if kind is DecisionKind.LAYOUT:
        what = f"layout of {subject[0]}"
        mine = _layout_text(_layout(chosen, subject[0]))
        theirs = "" if other is None else _layout_text(_layout(other, subject[0]))
        place = flow.nodes[subject[0]].span
    elif kind in (DecisionKind.FEWER, DecisionKind.MORE):
        pool = chosen.pool_of(subject[0])
        what = f"{kind.value} for {names[pool.part]}"
        mine = f"{pool.devices} devices"
        theirs = "" if other is None else f"{other.pool_of(subject[0]).devices} devices"
        place = span
    else:
        what = {"partition": "stages of pools", "colocated": "one pool", "disaggregated": "a pool for every stage"}[
            kind.value
        ]
        mine, theirs = _pools_text(flow, chosen), "" if other is None else _pools_text(flow, other)
        place = span
    return Choice(
        what=what,
        chosen=mine,
        runner_up=theirs,
        reason=alternative.reason,
        loss_us=0 if alternative.loss is None else round(alternative.loss.seconds * 1e6),
        span=place,
    )


def _pools_text(flow: Flow, candidate: Candidate) -> str:
    names = _pool_names(flow, candidate)
    return " | ".join(f"{names[p.part]} {p.devices}: {', '.join(p.stages)}" for p in candidate.pools)


def _layout_text(layout: Layout) -> str:
    axes = [
        f"{axis} {size}" for axis in ("dp", "tp", "pp", "cp", "ep", "etp", "vp") if (size := getattr(layout, axis)) > 1
    ]
    more = [f"zero {layout.zero}"] if layout.zero else []
    more += [f"recompute {layout.recompute}"] if layout.recompute != "none" else []
    return ", ".join([*axes, *more]) or "one device"
