"""How stages make a step: one after the other, streamed, or a step ahead. Formulas, not a simulation."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.validation.runs import Run
from rlflow.cost.knobs import Calibration
from rlflow.cost.roles import synchronous_step

TRAINER = ("old_logprob", "ref_logprob", "update", "advantage")
"""Stages of the trainer's side, one after the other."""
MOVES = ("reshard", "offload")


def step_of(run: Run, stages: Mapping[str, float], calibration: Calibration, saturated: float = 0.0) -> float | None:
    """Seconds of a step; None where a stage of it cannot be told.

    With training T, sync S, rollout D of one batch and a bound of eta batches on staleness the period is the largest
    ratio of the cycles of its token graph: (D + T + S)/(1 + eta) of a sample's way round, T + S of the trainer, and
    `saturated` of engines that never run dry. Streaming inside a step has eta = 0; all updates but the last overlap.
    """
    if not {"rollout", "update"} <= set(stages):
        return None
    mode, rollout = run.text["mode"], stages["rollout"]
    train = sum(stages.get(name, 0.0) for name in TRAINER)
    moves = sum(stages.get(name, 0.0) for name in MOVES)
    if mode == "synchronous":
        return synchronous_step(stages.values(), calibration)
    if mode == "streaming":
        longest = rollout + train / max(1, updates_of(run)) + moves
        return synchronous_step([max(longest, train + moves)], calibration)
    if mode == "one_step_off":
        return synchronous_step([max(rollout, train) + moves], calibration)
    bound = run.number("staleness_batches") or 0.0
    cycle = (rollout + train + moves) / (1 + bound)
    if run.source == "N" and bound:
        # NeMo-RL has at most `bound` batches of prompts under way (async_utils.py), and the next follow as these end.
        saturated = max(saturated, rollout / bound)
    return synchronous_step([max(cycle, train + moves, saturated)], calibration)


def updates_of(run: Run) -> int:
    """Optimizer steps of a batch, 1 where the row does not say."""
    prompts, each = run.count("prompts_per_step"), run.said("train_layout", r"mini-batch (\d+) prompts")
    return -(-prompts // each) if prompts and each else 1


def step_from_published(run: Run, calibration: Calibration) -> float | None:
    """The step from the published seconds of its stages; None where the row has too few.

    Synchronous rows: the sum. Asynchronous rows whose source gives the trainer's wait: wait and training. Both with the
    share of a step that is in no stage.
    """
    stages = run.published
    wait = run.number("trainer_wait_s")
    if "update" not in stages or run.number("step_s") is None:
        return None
    if run.is_synchronous:
        return synchronous_step(stages.values(), calibration) if "rollout" in stages else None
    if wait is None:
        return None
    return synchronous_step([wait, *(stages[name] for name in TRAINER if name in stages)], calibration)
