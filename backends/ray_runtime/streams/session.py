"""The streams of a plan as one rank sees them: those that it samples for, and those whose models it trains."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from rlflow.backends.ray_runtime.batch import Batch
from rlflow.backends.ray_runtime.spells import Spells
from rlflow.backends.ray_runtime.state import RankState
from rlflow.backends.ray_runtime.streams.sampler import Sampler
from rlflow.backends.ray_runtime.streams.specs import StreamSpec, stream_specs
from rlflow.backends.ray_runtime.waiting import answer
from rlflow.ir.ops import Generate
from rlflow.plan import Instruction, ReshardWeights, RunStage, TakeRows


class Streams:
    """Made when the models are loaded; does nothing for a plan without streams."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._edges = state.all.edges
        specs = stream_specs(state.plan)
        self._samplers = {
            spec.stage: Sampler(spec, state, self._edges[spec.stage]) for spec in specs if spec.source == state.pool
        }
        self._trained: list[StreamSpec] = [spec for spec in specs if spec.trainer == state.pool and state.rank == 0]

    def begin(self, done: int, last: int) -> None:
        """Steps done + 1 to `last` follow: sampling begins."""
        for stage, sampler in self._samplers.items():
            if self._state.rank == 0:
                begun = self._edges[stage].begin.remote(done, last, self._state.stream_cursors.get(stage))
                _answer(self._state, stage, begun)
            sampler.start()

    def finish(self, end: int) -> None:
        """The run has ended after step `end`."""
        for sampler in self._samplers.values():
            sampler.finish(end)

    # --- the pool that samples ----------------------------------------------------------------------------------------

    def takes_over(self, instruction: Instruction) -> bool:
        """Whether a stream does what the instruction of a step says: taking prompts, new weights, generating."""
        for sampler in self._samplers.values():
            spec = sampler.spec
            if isinstance(instruction, TakeRows) and not instruction.queue and instruction.stage == spec.take:
                return True
            if isinstance(instruction, ReshardWeights) and spec.stage in instruction.readers:
                return True
            if isinstance(instruction, RunStage) and instruction.stage == spec.stage:
                return True
        return False

    def batch(self, stage: str, step: int) -> Batch:
        """This rank's samples of the step."""
        return self._samplers[stage].batch(step)

    def spells(self, stage: str) -> Spells:
        """What the time of the stage's engine went to since somebody asked."""
        return self._samplers[stage].spells

    def held(self, instructions: Sequence[Instruction], step: int) -> contextlib.ExitStack:
        """Around an evaluation after `step`: the engines that it samples from are its own, with that step's weights."""
        stack = contextlib.ExitStack()
        for sampler in self._samplers.values():
            spec = sampler.spec
            fed = any(isinstance(i, ReshardWeights) and i.model == spec.model for i in instructions)
            if fed or any(isinstance(i, RunStage) and self._samples(i.stage, spec.model) for i in instructions):
                stack.enter_context(sampler.held(step if fed else None))
        return stack

    def _samples(self, stage: str, model: str) -> bool:
        op = self._state.plan.stage(stage).op
        return isinstance(op, Generate) and op.model == model

    # --- the pool that trains -----------------------------------------------------------------------------------------

    def begins(self, step: int) -> None:
        """A step begins on this pool."""
        for spec in self._trained:
            self._edges[spec.stage].want.remote(step)

    def published(self, model: str, step: int) -> None:
        """The model is trained and its weights are on their way."""
        for spec in self._trained:
            if spec.model == model:
                _answer(self._state, spec.stage, self._edges[spec.stage].trained.remote(step))


def trained_cursors(state: RankState) -> dict[str, Any]:
    """For a checkpoint: which prompts have ended, by the stage that samples, as JSON."""
    specs = [spec for spec in stream_specs(state.plan) if spec.trainer == state.pool]
    return {spec.stage: _answer(state, spec.stage, state.all.edges[spec.stage].cursor.remote()) for spec in specs}


def _answer(state: RankState, stage: str, ref: Any) -> Any:
    """Of the actor that admits a stage's samples. RLF5019."""
    world = state.all
    return answer(ref, world.timeout.total_seconds(), str(world), f"what admits the samples of `{stage}`")
