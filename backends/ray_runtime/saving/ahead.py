"""The samples that a pool is ahead of what is trained: kept for checkpoints, and given again after a resume.

With staleness s the pool that samples is up to s steps ahead. The samples of the steps i+1, i+2, ... that are made by
versions older than i (`Reading.ahead`) cannot be made again from a checkpoint of step i, so the ranks that make them
keep what `generate` gave, call after call, refills included. When the last of them is there, the part of the checkpoint
is whole. After a resume these steps take the same prompts (the cursors are those after step i) and get the kept samples
instead of sampling; everything that follows from them is computed anew.

At the end of a run nobody trains on samples of later steps, but the last checkpoint needs them all the same: `rest` is
the part of a step that makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlflow.backends.ray_runtime.batch import Batch, Column
from rlflow.backends.ray_runtime.deliveries import Reading, save_every, stale_samplers
from rlflow.backends.ray_runtime.rollout import own_samples
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import MixedGroups
from rlflow.plan import Instruction, Plan, ReshardWeights, RunStage, Stage, TakeRows, WaitStage

Key = tuple[int, str]
"""Step and stage."""
Columns = dict[str, Column]
"""What `generate` adds to its prompts, and `uid`, by which a wrong order of the data is found."""


@dataclass(frozen=True)
class AheadPart:
    """What a rank keeps for the checkpoint of `step`: the columns of all calls, and its other state after the step."""

    step: int
    state: dict[str, Any]
    calls: dict[Key, list[Columns]]


@dataclass
class Ahead:
    """Of one rank. `stages`: see `stale_samplers`; empty for a pool that is never ahead, where nothing is done."""

    stages: dict[str, Reading]
    every: int | None
    """Steps between checkpoints; None = there are none."""
    _given: dict[Key, list[Columns]] = field(default_factory=dict)
    """From a checkpoint, for the steps that follow it."""
    _calls: dict[Key, list[Columns]] = field(default_factory=dict)
    _open: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Checkpoints whose samples are not all there yet, each with the rank's other state after its step."""
    _newest: int = 0
    """The last step that a checkpoint was begun for."""

    @classmethod
    def of(cls, plan: Plan, pool: str) -> Ahead:
        every = save_every(plan)
        return cls(stale_samplers(plan, pool) if every is not None else {}, every)

    def resume(self, part: AheadPart) -> None:
        """The steps after `part.step` get its samples. Those that the plan makes with newer weights are left out."""
        self._newest = part.step
        self._given = {
            (step, stage): list(calls)
            for (step, stage), calls in part.calls.items()
            if stage in self.stages and step in self.stages[stage].ahead(part.step)
        }

    # --- generate ----------------------------------------------------------------------------------------------------

    def samples(self, stage: str, step: int, prompts: Batch, n: int, make: Callable[[], Batch]) -> Batch:
        """What a call of `generate` gives, of this rank's prompts: kept from before, or made now."""
        if stage not in self.stages:
            return make()
        given = self._given.get((step, stage))
        batch = _restored(given.pop(0), prompts, n, stage, step) if given else make()
        if self._is_asked_for(stage, step):
            new = {name: column for name, column in batch.columns.items() if name not in prompts.columns}
            columns = new | {"uid": batch.array("uid")}
            self._calls.setdefault((step, stage), []).append(columns)
        return batch

    def _is_asked_for(self, stage: str, step: int) -> bool:
        reading = self.stages[stage]
        return any(
            (done in self._open or (self.every and done % self.every == 0)) and step in reading.ahead(done)
            for done in range(max(0, step - reading.lag), step)
        )

    # --- steps -------------------------------------------------------------------------------------------------------

    def ended(self, step: int, capture: Callable[[], dict[str, Any]], save: bool = False) -> list[AheadPart]:
        """Step `step` has ended; the parts of checkpoints that are whole now, oldest first.

        `capture`: the rank's other state now. `save`: a checkpoint is written after this step, whatever the plan says.
        """
        if not self.stages:
            return []
        if step > self._newest and (save or (self.every and step % self.every == 0)):
            self._open[step] = capture()
            self._newest = step
        parts = []
        for done in sorted(self._open):
            if self.last(done) <= step:
                calls = {key: calls for key, calls in self._calls.items() if key[0] in self.stages[key[1]].ahead(done)}
                parts.append(AheadPart(done, self._open.pop(done), calls))
        oldest = min([*self._open, step - max(reading.lag for reading in self.stages.values())])
        self._calls = {key: calls for key, calls in self._calls.items() if key[0] > oldest}
        return parts

    def last(self, done: int) -> int:
        """The last step whose samples a checkpoint of step `done` needs; `done` itself where it needs none."""
        return max((reading.ahead(done).stop - 1 for reading in self.stages.values()), default=done)


def rest(plan: Plan, pool: str, stages: dict[str, Reading]) -> tuple[Instruction, ...]:
    """The instructions of a step that make the samples of `stages`, and decide whether more prompts are sampled."""
    wanted: set[str] = set()

    def add(stage: Stage) -> None:
        if stage.id not in wanted:
            wanted.add(stage.id)
            for before in stage.inputs.values():
                add(plan.stage(before))

    for stage in plan.stages:
        refills = (
            isinstance(stage.op, MixedGroups) and stage.op.refill > 0 and bool(set(_before(plan, stage)) & {*stages})
        )
        if stage.id in stages or (refills and stage.pool == pool):
            add(stage)

    def is_needed(instruction: Instruction) -> bool:
        if isinstance(instruction, ReshardWeights):
            return bool(wanted & set(instruction.readers))
        return isinstance(instruction, TakeRows | RunStage | WaitStage) and instruction.stage in wanted

    return tuple(instruction for instruction in plan.program(pool).step if is_needed(instruction))


def _before(plan: Plan, stage: Stage) -> Iterator[str]:
    for name in stage.inputs.values():
        yield name
        yield from _before(plan, plan.stage(name))


def _restored(columns: Columns, prompts: Batch, n: int, stage: str, step: int) -> Batch:
    """The samples of some prompts. RLF5010 when they are not those that the samples were made for."""
    _, own = own_samples(prompts, n)
    batch = prompts.select([sample // n for sample in own])
    uid = np.asarray(columns["uid"])
    if not np.array_equal(uid, batch.array("uid")):
        raise RunFailure(
            "RLF5010",
            f"the checkpoint holds samples of `{stage}` for other prompts than those that step {step} takes",
            stage=stage,
            notes=(f"{len(uid)} samples then, {batch.rows} now",),
            help=("resume with the plan, the data and the seed of the run",),
        )
    return batch.with_columns(**{name: column for name, column in columns.items() if name != "uid"})
