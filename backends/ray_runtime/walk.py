"""The order rules of an instruction list: what is executed when, measured, and forgotten.

What the kinds of instructions do is a subclass's: computing (`execute.Interpreter`), or sleeping for the time that
computing would take (`virtual`). No torch here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlflow.backends.ray_runtime.failures import stage_failed
from rlflow.backends.ray_runtime.row_stages import last_readers
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.plan import (
    Instruction,
    MoveObject,
    Plan,
    PublishWeights,
    PutRows,
    ReshardWeights,
    RunStage,
    SaveCheckpoint,
    Stage,
    TakeRows,
    WaitStage,
)

if TYPE_CHECKING:
    from rlflow.backends.ray_runtime.measure import StepMetrics


class Walk(ABC):
    """One pool's lists. Handlers that work on rows return the number of tokens for the trace, or None."""

    def __init__(self, plan: Plan, pool: str) -> None:
        self._stages = {stage.id: stage for stage in plan.stages}
        self._step = plan.program(pool).step
        self._last_reader = last_readers(plan, pool)

    def _execute(
        self, instructions: Sequence[Instruction], whole: Sequence[Instruction], step: int, metrics: StepMetrics
    ) -> None:
        """Execute `instructions`, a part of the list `whole`. Raises RunFailure naming the stage; any other exception
        becomes RLF5006."""
        for instruction in instructions:
            started = self._now()
            stage_id = getattr(instruction, "stage", "")
            try:
                self._before(instruction, step)
                if isinstance(instruction, SaveCheckpoint) and not _is_due(instruction, step):
                    continue
                tokens = self._handle(instruction, whole, step, metrics)
            except RunFailure as failure:
                raise failure.at(stage_id) from None
            except Exception as error:
                raise stage_failed(stage_id or instruction.id, error) from error
            metrics.instruction(instruction, step, started, self._now(), self._version(stage_id), tokens)
            self._after(instruction, step, metrics)
            if not isinstance(instruction, WaitStage):
                for value in self._last_reader.get(instruction.id, ()):
                    self._drop(value)  # memory is freed after the last reader

    def _handle(
        self, instruction: Instruction, whole: Sequence[Instruction], step: int, metrics: StepMetrics
    ) -> int | None:
        match instruction:
            case TakeRows():
                if not instruction.queue:
                    return self._take(self._stages[instruction.stage], step)
                self._take_queue(instruction, metrics)
            case PutRows():
                self._put_queue(instruction)
            case ReshardWeights():
                self._reshard(instruction, step, metrics)
            case RunStage():
                return self._run(self._stages[instruction.stage], whole, step, metrics)
            case WaitStage():
                self._wait(self._stages[instruction.stage], whole, step, metrics)
            case PublishWeights():
                self._publish(instruction.model, step)
            case MoveObject():
                self._move(instruction, step)
            case SaveCheckpoint():
                self._checkpoint(step)
        return None

    # --- around every instruction ------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    @abstractmethod
    def _before(self, instruction: Instruction, step: int) -> None:
        """What an instruction needs on the device comes, or is missed."""

    @abstractmethod
    def _after(self, instruction: Instruction, step: int, metrics: StepMetrics) -> None:
        """The instruction has ended and is measured."""

    @abstractmethod
    def _version(self, stage_id: str) -> int | None:
        """Of the model that a stage computes with."""

    @abstractmethod
    def _drop(self, stage_id: str) -> None:
        """Nobody reads the stage's result any more."""

    # --- kinds -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _take(self, stage: Stage, step: int) -> int | None:
        """Rows of a data set."""

    @abstractmethod
    def _take_queue(self, instruction: TakeRows, metrics: StepMetrics) -> None:
        """Rows or a column that another pool has put."""

    @abstractmethod
    def _put_queue(self, instruction: PutRows) -> None: ...

    @abstractmethod
    def _reshard(self, instruction: ReshardWeights, step: int, metrics: StepMetrics) -> None: ...

    @abstractmethod
    def _run(self, stage: Stage, whole: Sequence[Instruction], step: int, metrics: StepMetrics) -> int | None: ...

    @abstractmethod
    def _wait(self, stage: Stage, whole: Sequence[Instruction], step: int, metrics: StepMetrics) -> None: ...

    @abstractmethod
    def _publish(self, model: str, step: int) -> None: ...

    @abstractmethod
    def _move(self, instruction: MoveObject, step: int) -> None: ...

    @abstractmethod
    def _checkpoint(self, step: int) -> None: ...


def _is_due(instruction: SaveCheckpoint, step: int) -> bool:
    return bool(instruction.every and step % instruction.every == 0)
