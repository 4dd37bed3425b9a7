"""Metrics and trace events of one step on one rank, and their reduction over ranks.

Names are verl's where verl has one. Every value is kept with the number of rows it stands for, so that ranks and
stages reduce to the mean over all rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.backends.ray_runtime.idle import Idle, idle_of, queue_takes
from rlflow.ir.ops import (
    Gae,
    Generate,
    GroupNormalize,
    KlReward,
    Logprobs,
    ModelScore,
    ReinforcePp,
    Remax,
    Rloo,
    Score,
    Train,
    ValueModel,
    Values,
)
from rlflow.plan import Instruction, Plan, PublishWeights, SaveCheckpoint, Stage

if TYPE_CHECKING:
    from rlflow.backends.ray_runtime.batch import Batch

Weighted = tuple[float, float]
"""(sum, weight)"""

RANKS_NAMED = 16
"""Pools of at most so many ranks have the idle share of every rank among the metrics; traces have it of all."""


class StepMetrics:
    """Collects one step, or one evaluation when `evaluation` names it."""

    def __init__(self, plan: Plan, pool: str, rank: int, evaluation: str = "") -> None:
        self._plan = plan
        self._pool = pool
        self._rank = rank
        self._evaluation = evaluation
        self._stages = {stage.id: stage for stage in plan.stages}
        self.means: dict[str, Weighted] = {}
        self.highs: dict[str, float] = {}
        self.lows: dict[str, float] = {}
        self.sums: dict[str, float] = defaultdict(float)
        self.seconds: dict[str, float] = defaultdict(float)
        self.events: list[dict[str, Any]] = []
        self._first: dict[str, str] = {}
        self._waited = 0.0
        phase = [stage for stage in plan.stages if stage.phase == (evaluation or "step")]
        self._scoring = sum(isinstance(stage.op, Score | ModelScore) for stage in phase)

    @property
    def evaluation(self) -> str:
        """The evaluation that is collected; empty for a step."""
        return self._evaluation

    # --- what the interpreter reports --------------------------------------------------------------------------------

    def instruction(
        self, instruction: Instruction, step: int, start: float, end: float, version: int | None, tokens: int | None
    ) -> None:
        """One executed instruction; times in seconds since the epoch."""
        stage_id = getattr(instruction, "stage", "")
        self._event(instruction.id, stage_id, instruction.kind, step, start, end, version, tokens)
        if self._waited:
            self.events[-1]["waited_us"] = round(self._waited * 1e6)
            self._waited = 0.0
        name = _timing_name(instruction, self._stages.get(stage_id), self._plan)
        if name:
            self.seconds[name] += end - start

    def waited(self, seconds: float) -> None:
        """The instruction that is being executed has waited for another pool instead of working."""
        self._waited += seconds

    def call(self, stage: Stage, step: int, start: float, end: float, ended: float = 0.0) -> None:
        """An asynchronous call, from its start to the moment its result was collected; `ended` = when it was there,
        by the clock of its host (0 = not known)."""
        self._event(f"call:{stage.id}", stage.id, "call", step, start, end, None, None, pool=stage.pool)
        there = min(max(ended, start), end) if ended else end
        self.events[-1]["result_us"] = round((there - start) * 1e6)

    def _event(
        self,
        instruction: str,
        stage: str,
        kind: str,
        step: int,
        start: float,
        end: float,
        version: int | None,
        tokens: int | None,
        pool: str = "",
    ) -> None:
        event: dict[str, Any] = {
            "pool": pool or self._pool,
            "rank": self._rank,
            "instruction": instruction,
            "stage": stage,
            "kind": kind,
            "step": step,
            "start_us": round(start * 1e6),
            "duration_us": round((end - start) * 1e6),
            "version": version,
        }
        if tokens is not None:
            event["tokens"] = tokens
        self.events.append(event)

    def resident(self, device_bytes: int, planned_bytes: int, host_bytes: int) -> None:
        """What a device holds after the instruction that was reported last, and what the plan has there."""
        self.events[-1] |= {"device_bytes": device_bytes, "planned_bytes": planned_bytes, "host_bytes": host_bytes}

    def samples(self, samples: Batch, stage: str = "") -> None:
        """What a generate stage gave. Of several in a step the first has verl's names, the others their own before."""
        name = self._own("samples", stage)
        responses = samples.packed("response_ids").lengths.numpy()
        prompts = samples.packed("prompt_ids").lengths.numpy()
        self.spread(f"{name}response_length", responses)
        self.spread(f"{name}prompt_length", prompts)
        self.mean(f"{name}response_length/clip_ratio", samples.array("truncated"))
        if "turns" in samples.columns:
            self.spread(f"{name}num_turns", samples.array("turns"))
        self.sums["perf/total_num_tokens"] += float(responses.sum() + prompts.sum())

    def scores(self, stage: str, scores: np.ndarray, extras: Mapping[str, Sequence[Any]] | None = None) -> None:
        """What a reward gave: a score per sample, and numbers beside it, of which only means are kept."""
        name = stage.removeprefix(self._evaluation + ".")
        for extra, values in (extras or {}).items():
            numbers = [math.nan if value is None else value for value in values]
            if all(isinstance(value, int | float) for value in numbers):
                self.mean(f"{name}/{extra}/mean" if self._evaluation else f"reward_extra/{name}/{extra}/mean", numbers)
        if self._evaluation:
            self.spread(name, scores, short=True)
            return
        if self._scoring < 2:
            self.spread("critic/score", scores)
            self.spread("critic/rewards", scores)
        else:
            self.spread(f"reward/{name}", scores)

    def rewards(self, stage: str, rewards: np.ndarray) -> None:
        """What a stage learns from or selects by. Where several rewards are computed, it is the one to report."""
        if self._scoring > 1 and not self._evaluation and not self._own("rewards", stage):
            self.spread("critic/score", rewards)
            self.spread("critic/rewards", rewards)

    def _own(self, what: str, stage: str) -> str:
        """Empty for the first stage that reports `what`, `STAGE/` for others."""
        first = self._first.setdefault(what, stage)
        return "" if stage == first else f"{stage.removeprefix(self._evaluation + '.')}/"

    def ages(self, stage: str, ages: np.ndarray) -> None:
        """Ages [samples] of what is trained on now and `stage` has sampled: version that trains less the oldest version
        that made a token."""
        if not len(ages):
            return
        self.mean(f"age/{stage}/mean", ages)
        self.highs[f"age/{stage}/max"] = max(float(ages.max()), self.highs.get(f"age/{stage}/max", -math.inf))
        for age, count in zip(*np.unique(ages, return_counts=True), strict=True):
            self.sums[f"age/{stage}/count/{int(age)}"] += float(count)

    def whole_step(self, seconds: float, ranks: int) -> Idle:
        """The step has ended after `seconds`, on one of so many ranks: how much of it the rank was idle, and why."""
        program = self._plan.program(self._pool)
        idle = idle_of(self.events, round(seconds * 1e6), queue_takes(program.step))
        self.seconds["step"] = seconds
        pool = f"pool/{self._pool}"
        self.means[f"{pool}/idle"] = (idle.share, 1.0)
        if ranks > 1:
            self.highs[f"{pool}/idle_max"] = self.lows[f"{pool}/idle_min"] = idle.share
        if 1 < ranks <= RANKS_NAMED:
            self.sums[f"rank/{self._pool}/{self._rank}/idle"] = idle.share
        for name, us in idle.waits_us.items():
            self.means[f"{pool}/wait_s/{name}"] = (us / 1e6, 1.0)
        return idle

    def advantages(self, advantages: np.ndarray) -> None:
        self.spread("critic/advantages", advantages)

    def training(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.means[name] = (value, 1.0)

    def mean(self, name: str, numbers: np.ndarray | Sequence[float]) -> None:
        """Add numbers to a mean over rows (or tokens); NaN = not applicable."""
        total, weight = self.means.get(name, (0.0, 0.0))
        values = np.asarray(numbers, dtype=np.float64)
        values = values[~np.isnan(values)]  # not applicable: a reward returned None
        self.means[name] = (total + float(values.sum()), weight + len(values))

    def spread(self, name: str, values: np.ndarray, *, short: bool = False) -> None:
        """Mean, and unless `short` the extremes; NaN = not applicable."""
        self.mean(f"{name}/mean", values)
        values = values[~np.isnan(np.asarray(values, dtype=np.float64))]
        if short or not len(values):
            return
        self.highs[f"{name}/max"] = max(float(values.max()), self.highs.get(f"{name}/max", -math.inf))
        self.lows[f"{name}/min"] = min(float(values.min()), self.lows.get(f"{name}/min", math.inf))

    # --- reduction ---------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Any]:
        """Plain values that can travel to another rank."""
        return {
            "means": self.means,
            "highs": self.highs,
            "lows": self.lows,
            "sums": dict(self.sums),
            "seconds": dict(self.seconds),
        }


def reduce_parts(parts: list[dict[str, Any]]) -> dict[str, float]:
    """One flat dict over all ranks: row-weighted means, extremes, sums, and the slowest rank's seconds."""
    means: dict[str, list[float]] = {}
    out: dict[str, float] = {}
    for part in parts:
        for name, (total, weight) in part["means"].items():
            entry = means.setdefault(name, [0.0, 0.0])
            entry[0] += total
            entry[1] += weight
        for name, value in part["highs"].items():
            out[name] = max(value, out.get(name, -math.inf))
        for name, value in part["lows"].items():
            out[name] = min(value, out.get(name, math.inf))
        for name, value in part["sums"].items():
            out[name] = out.get(name, 0.0) + value
        for name, value in part["seconds"].items():
            out[f"timing_s/{name}"] = max(value, out.get(f"timing_s/{name}", 0.0))
    out |= {name: total / weight for name, (total, weight) in means.items() if weight}
    return out


def _timing_name(instruction: Instruction, stage: Stage | None, plan: Plan) -> str:
    """verl's name for the time of an instruction; empty for those it does not count."""
    if isinstance(instruction, PublishWeights):
        return "update_weights"
    if isinstance(instruction, SaveCheckpoint):
        return "save_checkpoint"
    if stage is None or instruction.kind in ("take", "put"):
        return ""
    op = stage.op
    if isinstance(op, Generate):
        return "gen"
    if isinstance(op, Score | ModelScore):
        return "reward"
    if isinstance(op, Values):
        return "values"
    if isinstance(op, Logprobs):
        return "old_log_prob" if plan.model(op.model).trainable else "ref"
    if isinstance(op, GroupNormalize | Rloo | ReinforcePp | Remax | KlReward | Gae):
        return "adv"
    if isinstance(op, Train):
        return "update_critic" if isinstance(plan.model(op.model).source, ValueModel) else "update_actor"
    return ""  # a selection's time includes that of the stages which a refill runs again
