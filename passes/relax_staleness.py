"""relax-staleness: how old samples may be, which rule admits them, and how the loss accounts for their age."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import ClassVar

from rlflow.cluster.spec import StalenessRequest, TriggerRequest
from rlflow.diagnostics import Label
from rlflow.ir.decisions import Stale
from rlflow.ir.flow import STEP, Edge, EdgeKind, Flow, Node, Stage
from rlflow.ir.losses import POLICY_TERMS, RATIO_TERMS, Behaviour, TruncatedIs
from rlflow.ir.ops import Generate, Train
from rlflow.ir.typesystem import RowsType
from rlflow.ir.updates import updates_of
from rlflow.passes.analysis.homes import homes_of
from rlflow.passes.base import Pass, PassContext
from rlflow.protocol.guarantees import Verdict, check
from rlflow.protocol.rule_names import RuleName
from rlflow.protocol.trigger import Trigger
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class RelaxStaleness(Pass):
    """Turn the staleness that the schedule asks for into tokens, an admission rule and a corrected loss.

    A weight edge to a generate stage on another pool gets 1 + s tokens. The age that the rule and the trigger let a
    sample reach is worked out and compared with what the flow permits. Where samples may be older than the newest
    version, the training of that model gets the correction that the flow names; without one its loss would take old
    samples for fresh ones, which is refused. On an edge without staleness nothing changes: not even the correction is
    there, so that s = 0 is the synchronous run.
    """

    name: ClassVar[str] = "relax-staleness"
    requires: ClassVar[Stage] = Stage.PHYSICAL
    ensures: ClassVar[Stage] = Stage.PHYSICAL

    def run(self, flow: Flow, context: PassContext) -> Flow:
        homes = homes_of(flow)
        requests = {request.model: request for request in context.schedule.staleness}
        triggers = _triggers(flow, context)
        for model in triggers:
            requests.setdefault(model, StalenessRequest(model, 0, "in_order"))
        decisions: list[Stale] = []
        for model, request in requests.items():
            trigger = triggers.get(model)
            if request.steps == 0 and trigger is None:
                continue
            decisions += _stale(flow, homes, request, trigger, context)
        if context.has_errors:
            return flow
        edges = tuple(_relax(edge, decisions) for edge in flow.edges if not _held_back(edge, decisions))
        relaxed = replace(flow, edges=edges, decisions=(*flow.decisions, *decisions))
        for decision in decisions:
            if decision.worst_age != 0:
                relaxed = _correct(relaxed, decision, context)
        return relaxed


def _triggers(flow: Flow, context: PassContext) -> dict[str, TriggerRequest]:
    """Model to the trigger on its samples. A trigger on a score or an advantage is one on the samples behind it."""
    found: dict[str, TriggerRequest] = {}
    for request in context.schedule.triggers:
        node = flow.nodes.get(request.node)
        rows = None if node is None else node.type
        source = flow.nodes.get(rows.origin) if isinstance(rows, RowsType) else None
        if source is None or not isinstance(source.op, Generate):
            context.error(
                "RLF2006",
                f"a trigger waits for samples, and `{request.node}` is no value of samples that a model generates",
                request.span,
                help=tuple(f"`trigger {n.id} at ...`" for n in flow.phase_nodes(STEP) if isinstance(n.op, Generate)),
            )
            continue
        first = found.setdefault(source.op.model, request)
        if first is not request:
            context.error(
                "RLF1002",
                f"the samples of `{source.op.model}` have two triggers",
                request.span,
                related=() if first.span is None else (Label(first.span, "first here", primary=False),),
            )
    return found


def _stale(
    flow: Flow,
    homes: dict[str, str],
    request: StalenessRequest,
    trigger: TriggerRequest | None,
    context: PassContext,
) -> list[Stale]:
    """A decision for every generate stage of the model that runs on another pool than its training."""
    trainer = next((n for n in flow.nodes.values() if isinstance(n.op, Train) and n.op.model == request.model), None)
    stages = [n for n in flow.phase_nodes(STEP) if isinstance(n.op, Generate) and n.op.model == request.model]
    apart = [n for n in stages if trainer is not None and homes[n.id] != homes[trainer.id]]
    what = "staleness" if request.steps else "a trigger"
    span = request.span or (None if trigger is None else trigger.span)
    if not apart:
        reason = f"`{request.model}` is not trained"
        if trainer is not None:
            reason = f"`{request.model}` generates and trains on `{homes[trainer.id]}`"
        if not stages:
            reason = f"`{request.model}` generates nothing in the step"
        context.error(
            "RLF2006",
            f"{what} needs rollout and training on separate pools, and {reason}",
            span,
            help=("leave this line out: on one pool every sample is fresh",),
        )
        return []
    return [_decide(flow, node, request, trigger, context) for node in apart]


def _relax(edge: Edge, decisions: list[Stale]) -> Edge:
    if edge.kind is EdgeKind.WEIGHTS:
        for decision in decisions:
            if edge.dst == decision.stage:
                return replace(edge, tokens=1 + decision.steps)
    return edge


def _held_back(edge: Edge, decisions: list[Stale]) -> bool:
    """Whether the edge makes a stage that may use older weights run before the training of its own step."""
    return edge.kind is EdgeKind.ORDER and any(edge.src == d.stage and d.steps > 0 for d in decisions)


def _correct(flow: Flow, decision: Stale, context: PassContext) -> Flow:
    """The flow with the training of the model corrected for the age of its samples."""
    for node in list(flow.nodes.values()):
        if not isinstance(node.op, Train) or node.op.model != decision.model:
            continue
        kinds: list[str] = [term.kind for term in node.op.loss if term.kind in POLICY_TERMS]
        if not kinds:
            continue  # likelihood and preference losses do not assume samples of the current policy
        correction = flow.corrections.get(decision.model)
        problem = _misfit(correction, kinds)
        if problem is not None:
            message, fix = problem
            bound = f"allow {decision.model} staleness <= {decision.permitted} step{'s' * (decision.permitted != 1)}"
            context.error(
                "RLF3002",
                f"samples of `{decision.model}` may be {_steps(decision.worst_age)} old, and {message}",
                decision.span,
                related=()
                if node.span is None
                else (Label(node.span, "this loss takes them for fresh", primary=False),),
                help=(f"in the flow: `{bound} with {fix}`",),
            )
            return flow
        flow = flow.with_nodes(replace(node, op=replace(node.op, correction=correction)))
        if isinstance(correction, Behaviour):
            flow = _without_old(flow, node.id)
    return flow


def _steps(age: int | None) -> str:
    return "any number of steps" if age is None else f"{age} step{'s' * (age != 1)}"


def _misfit(correction: TruncatedIs | Behaviour | None, kinds: list[str]) -> tuple[str, str] | None:
    """Why the correction does not account for the age of samples in these terms, and what would; None when it does."""
    whole = "gspo" in kinds
    fix = "truncated_is(2.0, level = sequence_mean)" if whole else "truncated_is(2.0)"
    if correction is None:
        return f"nothing in its loss (`{kinds[0]}`) accounts for that", fix
    if isinstance(correction, Behaviour):
        plain = [kind for kind in kinds if kind not in RATIO_TERMS]
        return (f"`{plain[0]}` has no ratio to take against the policy that sampled", fix) if plain else None
    if whole and correction.level == "token":
        return "`gspo` has one ratio for a response, while a weight of `truncated_is` belongs to a token", fix
    return None


def _without_old(flow: Flow, trainer: str) -> Flow:
    """Without the stage that recomputes log-probabilities for the ratio, which is taken against the samples' own."""
    old = flow.inputs(trainer).get("old")
    if old is None or flow.nodes[old].inserted_by != "insert-old-logprobs":
        return flow
    nodes = {node_id: node for node_id, node in flow.nodes.items() if node_id != old}
    return replace(flow, nodes=nodes, edges=tuple(e for e in flow.edges if old not in (e.src, e.dst)))


def _decide(
    flow: Flow, node: Node, request: StalenessRequest, trigger: TriggerRequest | None, context: PassContext
) -> Stale:
    """What is promised about the samples of one generate stage; reported where the flow does not permit it."""
    rows = node.type
    assert isinstance(rows, RowsType)
    assert rows.rows is not None
    permitted = flow.allowed_staleness.get(request.model, 0)
    asked = Trigger()
    if trigger is not None:
        share = Fraction(repr(round(trigger.share, 9)))  # as written: 70% is not the binary number next to 0.7
        asked = Trigger(share, "partial" if trigger.carry == "partial" else "finish", trigger.carry == "nothing")
    rule: RuleName = request.admit  # type: ignore[assignment]
    if rule == "in_order" and asked.carries:
        rule = "slack_edf"  # carried samples leave the order of admission
    if trigger is not None and asked.same_batch and rule in ("wait", "evict"):
        context.error(
            "RLF3008",
            f"`admit {rule}` knows its batch only when that is finished, so that training cannot start on it at "
            f"{trigger.share * 100:g}%",
            trigger.span,
            help=("`admit in_order` or `admit slack_edf`", "or another `carry` than `nothing`"),
        )
        asked = Trigger()
    verdict = check(
        rule,
        permitted=permitted,
        bound=request.steps,
        batch=rows.rows,
        group=rows.group,
        burst=request.burst,
        trigger=asked,
    )
    promised = verdict.guarantee
    decision = Stale(
        model=request.model,
        stage=node.id,
        steps=request.steps,
        permitted=permitted,
        admit=rule,
        burst=request.burst,
        trigger=float(asked.share),
        carry="finish" if trigger is None else trigger.carry,  # type: ignore[arg-type]
        guarantee="per_sample" if promised.kind == "per sample" else "aggregate",
        worst_age=promised.worst_age,
        drops_data=promised.drops_data,
        updates=max(
            updates_of(flow, n) for n in flow.nodes.values() if isinstance(n.op, Train) and n.op.model == request.model
        ),
        span=(trigger.span if trigger is not None and asked.carries else None) or request.span or node.span,
    )
    if promised.worst_age is None:
        context.warn(
            "RLF3005",
            f"`admit {rule}` bounds how many samples are under way, not the age of any one of them",
            decision.span,
            notes=(promised.words,),
            help=("`admit in_order` or `admit slack_edf` for a bound that holds for every sample",),
        )
    elif not verdict.allowed:
        _too_old(decision, verdict, trigger if asked.carries else None, context)
    if promised.biased:
        context.warn(
            "RLF3006",
            f"`admit {rule}` drops samples that grow too old, so that long responses are trained on less often",
            decision.span,
            help=("`admit in_order` keeps every sample",),
        )
    return decision


def _too_old(decision: Stale, verdict: Verdict, trigger: TriggerRequest | None, context: PassContext) -> None:
    """Report an age that the flow does not permit, with the nearest schedule that would do."""
    cause = f"`admit {decision.admit}` with staleness {decision.steps}"
    if trigger is not None:
        cause = f"a trigger at {decision.trigger * 100:g}% with carry-over and staleness {decision.steps}"
    fixes = []
    if verdict.nearest_share is not None:
        share = f"{math.ceil(verdict.nearest_share * 10_000) / 100:g}%"
        fixes.append(f"a trigger at {share} or more" if verdict.nearest_share < 1 else "no trigger")
        fixes.append("`carry nothing`: start early, and train on the whole batch before the next version")
    if verdict.nearest_bound is not None:
        bound = verdict.nearest_bound
        fixes.append(f"`staleness {decision.model} = {bound} step{'s' * (bound != 1)}`")
    if trigger is None and decision.admit == "wait":
        fixes.append("`admit in_order`, which keeps to the bound")
    allowed = f"allow {decision.model} staleness <= {_steps(decision.worst_age)}"
    context.error(
        "RLF3004",
        f"{cause} lets a sample of `{decision.model}` be {_steps(decision.worst_age)} old, and the flow permits "
        f"{decision.permitted}",
        decision.span,
        notes=(verdict.guarantee.words,),
        help=(*fixes, f"or permit it in the flow: `{allowed}`"),
    )
