"""Measures a flow on this machine: runs it for some steps as `rlflow run` does, and reads what the run recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from rlflow import __version__
from rlflow.cost.stated_lengths import read_lengths
from rlflow.diagnostics import RunFailure
from rlflow.ir.flow import STEP, Flow, Node, reads_model
from rlflow.ir.ops import Generate, Take, Train
from rlflow.passes.analysis.conditions import conditions_of, size_of
from rlflow.passes.analysis.work import generated_by
from rlflow.profile.engine_fit import fitted
from rlflow.profile.events import ByStep, Event, Recorded, recorded
from rlflow.profile.machine import this_machine
from rlflow.profile.table import LengthsProfile, Profile, StageProfile

if TYPE_CHECKING:
    from rlflow.backends.visualizers.progress import Progress
    from rlflow.driver import Checked, Options

WARM_UP = 2
"""Steps that do not count: caches are cold, and allocators grow."""


def profile(
    checked: Checked, options: Options, run_dir: Path, steps: int, progress: Progress, lengths: str = ""
) -> Profile:
    """Run `steps` steps in `run_dir` and measure them, with imposed `lengths` if they are stated.

    Raises what `runs.execute` raises, and KeyboardInterrupt for a run that was stopped early.
    """
    from rlflow import driver, runs

    plan = driver.plan_of(checked, options)
    base_dir = Path(plan.sources[0].path).parent
    end = runs.execute(runs.RunRequest(plan, base_dir, run_dir, steps, lengths=lengths), progress)
    if end.interrupted and end.step < end.total_steps:
        raise KeyboardInterrupt
    rows = runs.read_metrics(run_dir / "metrics.jsonl")
    facts = json.loads((run_dir / "run.json").read_text("utf-8"))
    return profile_of(checked.flow, plan.cluster, runs.read_events(run_dir), rows, facts)


def profile_of(
    flow: Flow,
    cluster: str,
    events: Iterable[Event],
    metrics: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    warm_up: int = WARM_UP,
) -> Profile:
    """The profile of a finished run of a scheduled flow: its ranks' events, its rows of metrics, its run.json.

    RunFailure RLF4005 when nothing but the warm-up was recorded.
    """
    events = list(events)
    found = recorded(events)
    seconds = {row["step"]: row["data"]["timing_s/step"] for row in metrics if "timing_s/step" in row["data"]}
    counted = [round(taken * 1e6) for step, taken in sorted(seconds.items()) if step > warm_up]
    if not counted:
        raise RunFailure("RLF4005", f"nothing was measured after the warm-up of {warm_up} steps")
    low, high = _quartiles(counted)
    return Profile(
        rlflow_version=__version__,
        flow=flow.name,
        cluster=cluster,
        machine=this_machine(),
        versions={name: str(version) for name, version in facts["versions"].items()},
        seed=facts["seed"],
        steps=len(seconds),
        warm_up=warm_up,
        step_us=round(median(counted)),
        step_low_us=low,
        step_high_us=high,
        stages=tuple(_stages(flow, found, warm_up, facts.get("lengths", ""))),
    )


def _stages(flow: Flow, found: Recorded, warm_up: int, imposed: str) -> Iterator[StageProfile]:
    for node in flow.nodes.values():
        times = found.stages.get(node.id)
        if not times:
            continue
        us = _counted(times, warm_up)
        low, high = _quartiles(us)
        size = size_of(flow, node)
        # What a take counts is prompts, which its rows do not grow with.
        tokens = found.tokens.get(node.id) if reads_model(node.op) is not None else None
        yield StageProfile(
            stage=node.id,
            phase=node.phase,
            conditions=conditions_of(flow, node),
            us=round(median(us)),
            low_us=low,
            high_us=high,
            steps=len(us),
            rows=size.rows,
            tokens=None if tokens is None else float(median(_counted(tokens, warm_up))) or None,
            prompt_tokens=None if tokens is None else _prompt_tokens(flow, node, found, warm_up),
            max_new=size.max_new,
            epochs=size.epochs,
            call_us=_median(found.calls.get(node.id), warm_up),
            publish_us=_median(found.instructions.get(f"publish:{node.op.model}"), warm_up)
            if isinstance(node.op, Train)
            else 0,
            engine=fitted([spell for step, own in found.spells[node.id].items() if step > warm_up for spell in own])
            if isinstance(node.op, Generate)
            else None,
            lengths=_lengths(imposed) if isinstance(node.op, Generate) and node.phase == STEP else None,
        )


def _lengths(imposed: str) -> LengthsProfile | None:
    """That were imposed on the responses; what a model did by itself is in the tokens."""
    if not imposed:
        return None
    stated = read_lengths(imposed)
    return LengthsProfile(mean=stated.mean, sigma=stated.sigma, prompt_share=stated.prompt_share)


def _prompt_tokens(flow: Flow, node: Node, found: Recorded, warm_up: int) -> float | None:
    """Mean tokens of the prompts from which the rows of a stage were generated."""
    source = node if isinstance(node.op, Generate) else generated_by(flow, node.id)
    while source is not None and not isinstance(source.op, Take):
        inputs = flow.inputs(source.id)
        above = inputs.get("prompts") or inputs.get("samples") or inputs.get("rows")
        source = None if above is None else flow.nodes[above]
    rows = None if source is None else size_of(flow, source).rows
    if source is None or rows is None or source.id not in found.tokens:
        return None
    return round(median(_counted(found.tokens[source.id], warm_up)) / rows, 3)


def _counted(values: ByStep, warm_up: int) -> list[int]:
    """Values after the warm-up, in order. Of an evaluation that ran during the warm-up only, the last one."""
    steps = sorted(values)
    after = [step for step in steps if step > warm_up] or steps[-1:]
    return [values[step] for step in after]


def _median(values: ByStep | None, warm_up: int) -> int:
    return round(median(_counted(values, warm_up))) if values else 0


def _quartiles(values: Sequence[int]) -> tuple[int, int]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return round(low), round(high)
