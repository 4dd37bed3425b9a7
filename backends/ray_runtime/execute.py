"""The interpreter: runs a pool's instruction lists, one handler per kind. It decides nothing; the plan has."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from rlflow.backends.ray_runtime.algorithms.advantages import group_normalize
from rlflow.backends.ray_runtime.batch import Batch, Packed
from rlflow.backends.ray_runtime.failures import stage_failed
from rlflow.backends.ray_runtime.measure import StepMetrics
from rlflow.backends.ray_runtime.reward_worker import Handle
from rlflow.backends.ray_runtime.state import RankState
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Generate, GroupNormalize, Logprobs, Score, Take, Train
from rlflow.plan import Instruction, PublishWeights, RunStage, SaveCheckpoint, Stage, TakeRows, WaitStage

Value = Batch | np.ndarray | Packed | Handle | None

EVALUATION_STEP_OFFSET = 1 << 40
"""Added to the step in an evaluation's random streams, so that they share no draw with training."""


class Interpreter:
    """Executes instruction lists against a rank's state. `save` writes a checkpoint of the step it is given."""

    def __init__(self, state: RankState, save: Callable[[int], None]) -> None:
        self._state = state
        self._save = save
        self._stages = {stage.id: stage for stage in state.plan.stages}
        self._values: dict[str, Value] = {}
        self._started: dict[str, float] = {}
        self._last_reader = _last_readers(state)

    def run(self, instructions: Sequence[Instruction], step: int, metrics: StepMetrics) -> None:
        """One pass over the list. Raises RunFailure naming the stage; any other exception becomes RLF5006."""
        self._values.clear()
        for instruction in instructions:
            started = time.time()
            stage_id = getattr(instruction, "stage", "")
            tokens: int | None = None
            try:
                if isinstance(instruction, TakeRows):
                    tokens = self._take(self._stages[stage_id], step)
                elif isinstance(instruction, RunStage):
                    tokens = self._run(self._stages[stage_id], step, metrics)
                elif isinstance(instruction, WaitStage):
                    self._wait(self._stages[stage_id], step, metrics)
                elif isinstance(instruction, PublishWeights):
                    self._publish(instruction.model)
                elif isinstance(instruction, SaveCheckpoint):
                    if not (instruction.every and step % instruction.every == 0):
                        continue
                    self._save(step)
            except RunFailure as failure:
                raise failure.at(stage_id) from None
            except Exception as error:
                raise stage_failed(stage_id or instruction.id, error) from error
            metrics.instruction(instruction, step, started, time.time(), self._version(stage_id), tokens)
            for value in self._last_reader.get(stage_id, ()):
                self._values.pop(value, None)  # memory is freed after the last reader

    # --- kinds -----------------------------------------------------------------------------------------------------

    def _take(self, stage: Stage, step: int) -> int:
        op = stage.op
        assert isinstance(op, Take)
        state = self._state
        data_set = state.data[op.data]
        if op.count is None:
            batch = data_set.all()
            batch = batch.select(np.array_split(np.arange(batch.rows), state.world)[state.rank])
        else:
            batch, state.cursors[op.data] = data_set.take(state.cursors[op.data], op.count, state.seed)
            share = op.count // state.world  # place has checked that it divides
            batch = batch.select(np.arange(state.rank * share, (state.rank + 1) * share))
        self._values[stage.id] = batch
        return len(batch.packed("prompt_ids").values)

    def _run(self, stage: Stage, step: int, metrics: StepMetrics) -> int | None:
        op = stage.op
        if isinstance(op, Generate):
            return self._generate(stage, op, step, metrics)
        if isinstance(op, Score):
            self._started[stage.id] = time.time()
            self._values[stage.id] = self._state.rewards[op.reward].start(self._batch(stage, "samples"))
            return None
        if isinstance(op, Logprobs):
            samples = self._batch(stage, "samples")
            trainer = self._state.models[op.model].trainer
            assert trainer is not None
            self._values[stage.id] = trainer.logprobs(samples, op.temperature)
            return _tokens(samples)
        if isinstance(op, GroupNormalize):
            scores = self._column(stage, "scores")
            origin = self._batch_of(stage.inputs["scores"])
            advantages = group_normalize(scores, origin.array("group"), std=op.std, epsilon=op.epsilon)
            metrics.advantages(advantages)
            self._values[stage.id] = advantages
            return None
        assert isinstance(op, Train), f"{op.kind} cannot be run"
        return self._train(stage, op, step, metrics)

    def _generate(self, stage: Stage, op: Generate, step: int, metrics: StepMetrics) -> int:
        model = self._state.models[op.model]
        assert model.engine is not None
        stream = step if stage.phase == "step" else step + EVALUATION_STEP_OFFSET
        prompts = self._batch(stage, "prompts")
        samples = model.engine.generate(prompts, op, seed=self._state.seed, step=stream, version=model.version)
        if samples.rows != prompts.rows * op.n:
            raise RunFailure("RLF5006", f"generate gave {samples.rows} samples for {prompts.rows} prompts x {op.n}")
        self._values[stage.id] = samples
        metrics.samples(samples)
        return _tokens(samples)

    def _train(self, stage: Stage, op: Train, step: int, metrics: StepMetrics) -> int:
        samples = self._batch(stage, "samples")
        model = self._state.models[op.model]
        assert model.trainer is not None
        reference = self._values[stage.inputs["reference"]] if "reference" in stage.inputs else None
        old = self._values[stage.inputs["old"]] if "old" in stage.inputs else None
        assert reference is None or isinstance(reference, Packed)
        assert old is None or isinstance(old, Packed)
        metrics.training(
            model.trainer.train(
                samples,
                self._column(stage, "advantages"),
                op,
                reference=reference,
                old=old,
                seed=self._state.seed,
                step=step,
                group=self._state.group,
            )
        )
        return _tokens(samples)

    def _wait(self, stage: Stage, step: int, metrics: StepMetrics) -> None:
        handle = self._values[stage.id]
        assert isinstance(handle, Handle)
        assert isinstance(stage.op, Score)
        scores, extras = self._state.rewards[stage.op.reward].collect(handle)
        self._values[stage.id] = scores
        metrics.scores(stage.id, scores, extras)
        metrics.call(stage, step, self._started.pop(stage.id), time.time())

    def _publish(self, model: str) -> None:
        state = self._state.models[model]
        state.version += 1
        if state.engine is not None:
            state.engine.load_weights(state.version)

    # --- values ----------------------------------------------------------------------------------------------------

    def _batch(self, stage: Stage, port: str) -> Batch:
        value = self._values[stage.inputs[port]]
        assert isinstance(value, Batch)
        return value

    def _column(self, stage: Stage, port: str) -> np.ndarray:
        value = self._values[stage.inputs[port]]
        assert isinstance(value, np.ndarray)
        return value

    def _batch_of(self, stage_id: str) -> Batch:
        """The samples that a per-sample column was computed on."""
        while True:
            value = self._values[stage_id]
            if isinstance(value, Batch):
                return value
            inputs = self._stages[stage_id].inputs
            stage_id = inputs.get("samples") or inputs["scores"]

    def _version(self, stage_id: str) -> int | None:
        model = getattr(self._stages[stage_id].op, "model", None) if stage_id in self._stages else None
        return self._state.models[model].version if model is not None else None


def _tokens(samples: Batch) -> int:
    return len(samples.packed("prompt_ids").values) + len(samples.packed("response_ids").values)


def _last_readers(state: RankState) -> dict[str, list[str]]:
    """Stage to the values nobody reads after it. A column keeps the samples it was computed on."""
    out: dict[str, list[str]] = {}
    program = next(p for p in state.plan.programs if p.pool == state.pool)
    for instructions in (program.step, *(e.instructions for e in program.evaluations)):
        last: dict[str, str] = {}
        for instruction in instructions:
            if not isinstance(instruction, RunStage):
                continue
            stack = list(state.plan.stage(instruction.stage).inputs.values())
            while stack:
                value = stack.pop()
                last[value] = instruction.stage
                stack.extend(state.plan.stage(value).inputs.values())
        for value, reader in last.items():
            out.setdefault(reader, []).append(value)
    return out
