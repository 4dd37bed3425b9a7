"""The interpreter: runs a pool's instruction lists, one handler per kind. It decides nothing; the plan has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rlflow.backends.ray_runtime.batch import Share
from rlflow.backends.ray_runtime.measure import StepMetrics
from rlflow.backends.ray_runtime.place import PlaceNote
from rlflow.backends.ray_runtime.pool_edges import PoolEdges
from rlflow.backends.ray_runtime.residency import residency_of
from rlflow.backends.ray_runtime.run_logs import doing
from rlflow.backends.ray_runtime.stages import RUN, WAIT
from rlflow.backends.ray_runtime.stages.call import Call, Frame, Handlers, Value, token_count
from rlflow.backends.ray_runtime.state import RankState
from rlflow.backends.ray_runtime.streams.session import Streams
from rlflow.backends.ray_runtime.walk import Walk
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Take
from rlflow.plan import (
    Instruction,
    MoveObject,
    PutRows,
    ReshardWeights,
    RunStage,
    Stage,
    TakeRows,
    WaitStage,
)


class Interpreter(Walk):
    """Executes instruction lists against a rank's state. `save` writes a checkpoint of the step it is given."""

    def __init__(
        self,
        state: RankState,
        save: Callable[[int], None],
        place: PlaceNote | None = None,
        streams: Streams | None = None,
    ) -> None:
        self._state = state
        self._save = save
        self._place = place or PlaceNote()
        self._streams = streams or Streams(state)
        super().__init__(state.plan, state.pool)
        self._edges = PoolEdges(state.plan, state.all, state.cursors)
        self._edges.connect()
        self._frame = Frame()
        self.residency = residency_of(state)
        """None for a pool whose memory the plan does not know: everything is on the device all the time."""

    @property
    def _values(self) -> dict[str, Value]:
        return self._frame.values

    def run(self, instructions: Sequence[Instruction], step: int, metrics: StepMetrics) -> None:
        """One pass over the list. Raises RunFailure naming the stage; any other exception becomes RLF5006."""
        self._frame = Frame()
        if instructions is self._step:
            self._streams.begins(step)
            self._execute(instructions, instructions, step, metrics)
            return
        with self._streams.held(instructions, step), self._outside(instructions):
            self._execute(instructions, instructions, step, metrics)

    def _outside(self, instructions: Sequence[Instruction]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.residency is None else self.residency.outside(instructions)

    # --- around every instruction ------------------------------------------------------------------------------------

    def _before(self, instruction: Instruction, step: int) -> None:
        doing(f"step {step} {instruction.id}")
        self._place.at(step, instruction.id)
        if self.residency is not None:
            self.residency.before(instruction)

    def _after(self, instruction: Instruction, step: int, metrics: StepMetrics) -> None:
        if self.residency is not None:
            self.residency.after(instruction, step, metrics)

    def _version(self, stage_id: str) -> int | None:
        model = getattr(self._stages[stage_id].op, "model", None) if stage_id in self._stages else None
        found = self._state.models.get(model) if model is not None else None
        return None if found is None else found.version

    def _drop(self, stage_id: str) -> None:
        self._frame.drop(stage_id)

    def _handle(
        self, instruction: Instruction, whole: Sequence[Instruction], step: int, metrics: StepMetrics
    ) -> int | None:
        if whole is self._step and self._streams.takes_over(instruction):
            return self._streamed(instruction, step, metrics)
        return super()._handle(instruction, whole, step, metrics)

    # --- kinds -----------------------------------------------------------------------------------------------------

    def _take(self, stage: Stage, step: int) -> int:
        op = stage.op
        assert isinstance(op, Take)
        state = self._state
        data_set = state.data[op.data]
        training = stage.phase == "step"
        if op.count is None:
            batch = data_set.all()
        else:
            # An evaluation sees the same first rows every time, and takes none away from training.
            batch, cursor = data_set.take(state.cursors[op.data] if training else 0, op.count, state.seed)
            if training:
                state.cursors[op.data] = cursor
        if training and batch.rows % state.world:
            # Samples are shared out, not prompts. A prompt that several ranks sample from is counted on the first.
            share = Share(batch.rows, state.rank, state.world)
            counted = batch.select(share.begun)
            batch = replace(batch.select(share.touched), share=share)
        else:
            batch = counted = batch.select(np.array_split(np.arange(batch.rows), state.world)[state.rank])
        self._frame.put(stage, batch)
        return len(counted.packed("prompt_ids").values)

    def _streamed(self, instruction: Instruction, step: int, metrics: StepMetrics) -> int | None:
        """What a stream does all the time; its generate stage gives what has been made for the step."""
        if not isinstance(instruction, RunStage):
            return None
        samples = self._streams.batch(instruction.stage, step)
        self._frame.put(self._stages[instruction.stage], samples)
        metrics.samples(samples, instruction.stage)
        return token_count(samples)

    def _take_queue(self, instruction: TakeRows, metrics: StepMetrics) -> None:
        depth = self._edges.take(instruction, self._frame)
        if depth is not None:
            metrics.mean(f"queue/{instruction.queue}/depth", [depth])

    def _put_queue(self, instruction: PutRows) -> None:
        self._edges.put(instruction, self._frame)

    def _reshard(self, instruction: ReshardWeights, step: int, metrics: StepMetrics) -> None:
        evaluation = bool(metrics.evaluation)
        metrics.waited(self._state.receive(instruction.model, instruction.readers, step, evaluation))

    def _run(self, stage: Stage, whole: Sequence[Instruction], step: int, metrics: StepMetrics) -> int | None:
        return self._call(RUN, stage, whole, step, metrics)

    def _wait(self, stage: Stage, whole: Sequence[Instruction], step: int, metrics: StepMetrics) -> None:
        self._call(WAIT, stage, whole, step, metrics)

    def _call(
        self, handlers: Handlers, stage: Stage, whole: Sequence[Instruction], step: int, metrics: StepMetrics
    ) -> int | None:
        def rerun(target: Stage) -> Frame:
            return self._rerun(target, whole, step, metrics)

        call = Call(stage, self._state, step, metrics, self._frame, rerun)
        self._frame.put(stage, handlers[stage.op.kind](call, stage.op))
        return call.tokens

    def _rerun(self, target: Stage, whole: Sequence[Instruction], step: int, metrics: StepMetrics) -> Frame:
        """Everything that `target` depends on, once more in a frame of its own: `take` gives the next prompts."""
        wanted: set[str] = set()
        stack = list(target.inputs.values())
        while stack:
            stage_id = stack.pop()
            wanted.add(stage_id)
            stack.extend(self._stages[stage_id].inputs.values())
        needed = [i for i in whole if isinstance(i, TakeRows | RunStage | WaitStage) and i.stage in wanted]
        outer, self._frame = self._frame, Frame()
        try:
            with self._outside(needed):
                self._execute(needed, whole, step, metrics)
            return self._frame
        finally:
            self._frame = outer

    def _move(self, instruction: MoveObject, step: int) -> None:
        if self.residency is None:
            raise RunFailure(
                "RLF5033", f"the plan moves `{instruction.object}` and has no table of memory for the pool"
            )
        self.residency.move(instruction, step)

    def _publish(self, model: str, step: int) -> None:
        self._state.publish(model)
        self._streams.published(model, step)

    def _checkpoint(self, step: int) -> None:
        self._save(step)
