"""How a run stands, in a few lines: from its run.json and metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rlflow.amounts import seconds as exact
from rlflow.backends.visualizers.flow_metrics import held_out, is_step, number, reward_of, stage_seconds
from rlflow.backends.visualizers.progress import duration

LAST = 10
"""Steps that `now` is a mean over."""


def standing_lines(
    facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], folder: str, checkpoint: str = ""
) -> list[str]:
    """Status and step, reward, held-out scores, time of a step and where it goes, checkpoint. Values that were not
    recorded, or that are of another kind than expected, are left out."""
    steps = [row for row in rows if is_step(row["data"])]
    lines = [f"run folder: {folder}", _status(facts, steps)]
    rewards = [reward for row in steps if (reward := number(reward_of(row["data"]))) is not None]
    if rewards:
        tail = rewards[-LAST:]
        now = sum(tail) / len(tail)
        lines.append(f"mean reward: {rewards[0]:.3f} in the first step, {now:.3f} over the last {len(tail)}")
    held: dict[str, list[float]] = {}
    for row in rows:
        for name, value in held_out(row["data"]).items():
            held.setdefault(name, []).append(value)
    lines += [f"held out {name}: {values[0]:.3f} first, {values[-1]:.3f} last" for name, values in sorted(held.items())]
    lines += _times(steps)
    if checkpoint:
        lines.append(f"checkpoint: {checkpoint}")
    return lines


def _status(facts: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> str:
    done = max((row["step"] for row in steps), default=0)
    total = facts.get("steps")
    of = f" of {total}" if isinstance(total, int) else ""
    words = f"flow {facts.get('flow', '?')}: {facts.get('status', 'not started')}, step {done}{of}"
    seconds = facts.get("seconds")
    if isinstance(seconds, int | float) and facts.get("status") != "running":
        words += f", {duration(seconds)}"
    return words + (f"; seed {facts['seed']}" if "seed" in facts else "")


def _times(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    whole = [s for row in steps if (s := number(row["data"].get("timing_s/step"))) is not None]
    if not whole:
        return []
    middle = median(whole)
    stages: dict[str, list[float]] = {}
    for row in steps:
        for name, seconds in stage_seconds(row["data"]):
            stages.setdefault(name, []).append(seconds)
    shares = sorted(((median(values), name) for name, values in stages.items()), reverse=True)
    shown = ", ".join(f"{name} {seconds / middle:.0%}" for seconds, name in shares if middle and seconds * 100 > middle)
    return [f"a step: {exact(round(middle * 1e6))}" + (f" ({shown})" if shown else "")]
