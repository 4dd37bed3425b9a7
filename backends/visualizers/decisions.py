"""Every decision of a plan in words: what was chosen, what came next, and why it lost."""

from __future__ import annotations

from rlflow.amounts import seconds, size
from rlflow.backends.visualizers.resources import memory_lines
from rlflow.backends.visualizers.summary import describe_stale
from rlflow.backends.visualizers.words import describe_layout, describe_span
from rlflow.plan import Layout, Plan
from rlflow.plan_decisions import StageEstimate


def explain_plan(plan: Plan) -> str:
    """The text of `rlflow explain PLAN`, with a final newline."""
    lines = [f"plan of flow {plan.flow} on cluster {plan.cluster}", ""]
    lines += _pinned(plan)
    lines += _search(plan)
    lines += _choices(plan)
    lines += _inserted(plan)
    lines += _placed(plan)
    lines += _memory(plan)
    lines += _limits(plan)
    return "\n".join(lines).rstrip() + "\n"


def _pinned(plan: Plan) -> list[str]:
    if not plan.pinned:
        return ["the schedule pins nothing", ""]
    return ["pinned by the schedule", *(f"  {p.what}   ({describe_span(p.span)})" for p in plan.pinned), ""]


def _search(plan: Plan) -> list[str]:
    found = plan.search
    if found is None:
        return []
    proof = "nothing in the cost model is faster" if found.proven else f"within {found.gap:.1%} of what is possible"
    if found.stopped_early:
        proof += "; the search ran out of time"
    lines = [
        "searched by the compiler",
        f"  a step every {seconds(found.us)}; lower bound {seconds(found.lower_bound_us)}: {proof}",
        f"  {found.partitions} ways to share pools, {found.joint_choices} joint choices of layouts",
    ]
    lines += [f"  runner-up: {pools}: {why}" for pools, why in found.runners_up]
    return [*lines, ""]


def _choices(plan: Plan) -> list[str]:
    lines = ["chosen by the compiler"] if plan.choices else []
    for choice in plan.choices:
        lines.append(f"  {choice.what}: {choice.chosen}   ({describe_span(choice.span)})")
        other = f"instead of: {choice.runner_up}: " if choice.runner_up else "without an alternative: "
        lines.append(f"    {other}{choice.reason}")
    return [*lines, ""] if lines else []


def _inserted(plan: Plan) -> list[str]:
    lines: list[str] = []
    for channel in plan.channels:
        lines += [f"  {describe_stale(reader)}   ({describe_span(reader.span)})" for reader in channel.stale]
    for stage in plan.stages:
        correction = getattr(stage.op, "correction", None)
        if correction is not None:
            lines.append(f"  {stage.id}: loss corrected by {correction.kind}, since its samples may be old")
        if stage.because.inserted_by:
            lines.append(f"  {stage.id}: inserted by {stage.because.inserted_by} ({stage.because.reason})")
    for queue in plan.queues:
        lines.append(f"  queue {queue.id}: {queue.capacity} batches, one more than the staleness lets be ahead")
    for reshard in plan.reshards:
        lines.append(
            f"  reshard {reshard.model}: at most {size(reshard.busiest)} into, {size(reshard.sent)} out of a device; "
            f"{size(reshard.node_in)} and {size(reshard.node_out)} a node; {reshard.rounds} rounds of "
            f"{size(reshard.bucket_bytes)}"
        )
        mapped = ", ranks mapped to what is there" if reshard.mapping else ""
        if reshard.adapters:
            mapped += "; adapters only, which the readers add to the frozen weights that they keep"
        if reshard.in_place:
            staged = sum(act == "stage" for act, _ in reshard.order)
            mapped += (
                f"; in place, over the trained weights, which the host keeps meanwhile: {len(reshard.order) - staged} "
                f"tensors in order, {staged} of them through the buckets"
            )
        if reshard.padded_vocabulary:
            rows, read = reshard.padded_vocabulary
            mapped += f"; vocabulary padded to {rows} rows in training and {read} where it is read"
        lines.append(
            f"  reshard {reshard.model} {reshard.source} -> {reshard.target}: {size(reshard.received)} received, the "
            f"least possible; {size(reshard.local)} already there{mapped}"
        )
    for program in plan.programs:
        for i in program.step:
            if i.kind in ("offload", "onload", "drop", "save"):
                lines.append(f"  {program.pool}: {i.kind} {i.object}, {size(i.bytes)} a device, {seconds(i.us)}")
    return ["inserted by passes", *lines, ""] if lines else []


def _placed(plan: Plan) -> list[str]:
    measured = "" if plan.profile is None else f", with the times of profile {plan.profile.path}"
    lines = [f"placed{measured}"]
    for stage in plan.stages:
        layout = "" if stage.layout is None or stage.layout == Layout() else f" {describe_layout(stage.layout)}"
        layout += f", {stage.kv_copies} copies of every key-value head" if stage.kv_copies > 1 else ""
        time = next((f", {describe_estimate(e)}" for e in plan.estimates if e.stage == stage.id), "")
        lines.append(f"  {stage.id} on {stage.pool}{layout}{time}   ({describe_span(stage.because.span)})")
    return [*lines, ""]


def describe_estimate(estimate: StageEstimate) -> str:
    """The time of a stage and, from a profile, what it was measured for and where it goes."""
    words = f"{seconds(estimate.us)}" + (f" ({estimate.measured})" if estimate.measured else "")
    if estimate.measured and len(estimate.parts) > 1:
        words += ": " + ", ".join(f"{name} {seconds(us)}" for name, us in estimate.parts)
    return words


def _memory(plan: Plan) -> list[str]:
    found = [text for _, text in memory_lines(plan)]
    return [*found, ""] if found else []


def _limits(plan: Plan) -> list[str]:
    found = plan.cadence
    if found is None:
        return []
    cycle = " -> ".join(f"{name} {seconds(us)}" for name, us in zip(found.cycle, found.cycle_us, strict=True) if us)
    lines = [
        "what limits a step",
        f"  {seconds(found.us)}: {cycle}" + (f", {found.tokens} tokens" if found.tokens > 1 else ""),
    ]
    lines += [f"  {name} could take {seconds(us)} longer" for name, us in found.slack if us]
    lines += [f"  with {name} in no time: {seconds(us)}" for name, us in found.without]
    lines += [f"  with one more token on {edge}: {seconds(us)}" for edge, us in found.one_more_token]
    lines += [f"  staleness of {model} beyond {steps} changes nothing" for model, steps in found.useful_staleness]
    return lines
