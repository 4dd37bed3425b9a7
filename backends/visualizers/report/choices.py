"""The decisions of a plan as a table: chosen, runner-up, and what choosing that would cost."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.amounts import seconds
from rlflow.backends.visualizers.report.timeline import span_key
from rlflow.backends.visualizers.words import describe_span
from rlflow.plan import Plan
from rlflow.plan_parts import SpanRef


@dataclass(frozen=True, slots=True)
class Row:
    """`by`: `schedule` for what the user pinned, `compiler` for what it chose, or the pass that put something in."""

    by: str
    what: str
    chosen: str
    runner_up: str
    loss: str
    why: str
    place: str
    key: str


def choice_rows(plan: Plan) -> list[Row]:
    """What the compiler chose, stages that passes put in, and what the schedule pins."""
    rows = []
    for choice in plan.choices:
        loss = f"{'+' if choice.loss_us > 0 else '-'}{seconds(abs(choice.loss_us))} a step" if choice.loss_us else ""
        runner_up = choice.runner_up or "none that is legal and fits"
        rows.append(_row("compiler", choice.what, choice.chosen, choice.span, runner_up, loss, choice.reason))
    for stage in plan.stages:
        because = stage.because
        if because.inserted_by:
            rows.append(_row(because.inserted_by, "stage put in", stage.id, because.span, why=because.reason))
    pins = [_row("schedule", "pinned", pinned.what, pinned.span) for pinned in plan.pinned]
    return rows + pins


def _row(by: str, what: str, chosen: str, span: SpanRef, runner_up: str = "", loss: str = "", why: str = "") -> Row:
    return Row(by, what, chosen, runner_up, loss, why, describe_span(span), span_key(span))


def search_lines(plan: Plan) -> list[str]:
    """How the placement was found, in words; empty where the schedule left nothing to search for."""
    found = plan.search
    if found is None:
        return []
    proof = "nothing in the cost model is faster" if found.proven else f"within {found.gap:.1%} of what is possible"
    stopped = "; the search ran out of time" if found.stopped_early else ""
    lines = [
        f"a step every {seconds(found.us)}; lower bound {seconds(found.lower_bound_us)}: {proof}{stopped}",
        f"{found.partitions} ways to share pools, {found.joint_choices} joint choices of layouts",
    ]
    return lines + [f"runner-up: {pools}: {why}" for pools, why in found.runners_up]


def limit_lines(plan: Plan) -> list[str]:
    """What limits a step, and what would change it."""
    found = plan.cadence
    if found is None:
        return []
    cycle = " → ".join(f"{name} {seconds(us)}" for name, us in zip(found.cycle, found.cycle_us, strict=True) if us)
    lines = [f"{seconds(found.us)}: {cycle}" + (f", {found.tokens} tokens" if found.tokens > 1 else "")]
    lines += [f"with {name} in no time: {seconds(us)}" for name, us in found.without]
    lines += [f"with one more token on {edge}: {seconds(us)}" for edge, us in found.one_more_token]
    lines += [f"{name} could take {seconds(us)} longer" for name, us in found.slack if us]
    lines += [f"staleness of {model} beyond {steps} changes nothing" for model, steps in found.useful_staleness]
    return lines
