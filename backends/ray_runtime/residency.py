"""What of a rank's memory is on its device when: executes the plan's moves, refuses a stage that lacks something, and
measures.

A plan with a table of memory for the pool lays out one step. This class brings the rank to the state at the start of a
step, executes `offload`, `onload` and `drop`, and measures after every instruction what the objects of the table take
(see held_objects.py). Evaluations, checkpoints and samples that a selection draws again are no part of the step that
the table lays out: for them everything that they need comes, after the others that the table names have left, and
everything is as before afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from rlflow.backends.ray_runtime.held_objects import Held
from rlflow.backends.ray_runtime.held_table import HeldTable, at_start
from rlflow.backends.ray_runtime.measure import StepMetrics
from rlflow.backends.ray_runtime.residency_ledger import Ledger
from rlflow.backends.ray_runtime.state import RankState
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Generate, Train
from rlflow.plan import Instruction, MoveObject, PublishWeights, ReshardWeights, RunStage, Stage
from rlflow.plan_decisions import PoolMemory


def residency_of(state: RankState) -> Residency | None:
    """None for a pool whose memory the plan does not know."""
    table = next((memory for memory in state.plan.memory if memory.pool == state.pool), None)
    return None if table is None else Residency(state, table)


class Residency:
    """Of one rank, from before its first step. RunFailure RLF5033 where a stage of the step would lack an object."""

    def __init__(self, state: RankState, memory: PoolMemory) -> None:
        self._state = state
        self._program = state.plan.program(state.pool).step
        start = at_start(self._program)
        self._table = HeldTable(state, memory)
        try:
            self._check(dict(start))
        except RunFailure:
            # The plan has the optimizer away while a stage reads the float32 weights: they are then counted with the
            # weights, above what the plan has for those, which the ledger tells.
            self._table = HeldTable(state, memory, master_in_optimizer=False)
            self._check(dict(start))
        self.objects = self._table.objects
        """By their names in the table."""
        self.ledger = Ledger(state, self._table, memory)
        for name, held in self._table.objects.items():
            if start.get(name):
                held.leave(start[name], keep=True)  # an engine's first weights are those that it was made with
        for name, cache in self._table.caches.items():
            cache.away = start.get(name, 0)
        for stage in state.plan.stages:
            engine = self._table.engine(stage)
            if engine is not None:
                engine.release()

    def _check(self, away: dict[str, int]) -> None:
        """Walk the step without moving anything: better here than in the middle of a step."""
        for instruction in self._program:
            if isinstance(instruction, MoveObject):
                sign = -1 if instruction.kind == "onload" else 1
                away[instruction.object] = max(0, away.get(instruction.object, 0) + sign * instruction.bytes)
                continue
            if isinstance(instruction, ReshardWeights):
                away |= {held.name: 0 for held in self._written(instruction)}
            for held in self._needed(instruction):
                if away.get(held.name):
                    raise self._missing(instruction, held, away[held.name])

    # --- instructions ------------------------------------------------------------------------------------------------

    def move(self, instruction: MoveObject, step: int) -> None:
        """Execute a move. Copies that the plan hides run beside what comes next."""
        cache = self._table.caches.get(instruction.object)
        if cache is not None:
            sign = -1 if instruction.kind == "onload" else 1
            cache.away = min(cache.whole, max(0, cache.away + sign * instruction.bytes))
            if sign > 0:
                cache.engine.release()
            return
        held = self._table.objects.get(instruction.object)
        if held is None:
            raise RunFailure(
                "RLF5033",
                f"pool `{self._state.pool}` is to {instruction.kind} `{instruction.object}`, which it does not hold",
                notes=(f"it holds {', '.join(sorted(self._table.objects)) or 'nothing that can move'}",),
                help=("compile the plan anew with this version of rlflow",),
            )
        aside = instruction.exposed_us < instruction.us
        if instruction.kind == "onload":
            held.come(instruction.bytes, aside)
            return
        self._settle(held)
        held.leave(instruction.bytes, instruction.kind == "offload" or self._stays_valid(held, step), aside)

    def before(self, instruction: Instruction) -> None:
        """What a stage, a publish or a reshard reads and writes is there. RunFailure RLF5033 where it is not."""
        if isinstance(instruction, ReshardWeights):
            for held in self._written(instruction):
                held.come(held.away_bytes)  # a plan has no other instruction for what a reshard writes anyway
                held.arrive()
        for held in self._needed(instruction):
            if held.away_bytes:
                raise self._missing(instruction, held, held.away_bytes)
            held.arrive()

    def after(self, instruction: Instruction, step: int, metrics: StepMetrics) -> None:
        """Measure, then free what the stage needed only while it ran. RunFailure RLF5034 beyond the device."""
        stage = self._stage(instruction)
        self.ledger.measure(instruction, stage, step, metrics)
        if stage is None:
            return
        engine = self._table.engine(stage)
        if engine is not None:
            engine.release()
        if isinstance(stage.op, Train):
            trainer = self._state.models[stage.op.model].trainer
            assert trainer is not None
            trainer.drop_gradients()

    @contextlib.contextmanager
    def outside(self, instructions: Sequence[Instruction]) -> Iterator[None]:
        """Around instructions that are no part of the step which the table lays out."""
        needed: list[Held] = []
        for instruction in instructions:
            needed += self._needed(instruction)
            needed += self._written(instruction) if isinstance(instruction, ReshardWeights) else ()
        with self._here(needed):
            yield

    @contextlib.contextmanager
    def trained(self) -> Iterator[None]:
        """With all that a checkpoint holds."""
        names = [name for name in self._state.models if self._state.trains(name)]
        with self._here(self._table.of_training(names)):
            yield

    # --- parts -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _here(self, needed: Iterable[Held]) -> Iterator[None]:
        wanted = {held.name: held for held in needed}
        if not any(held.away_bytes for held in wanted.values()):
            for held in wanted.values():
                held.arrive()
            yield
            return
        before = {held.name: held.away_bytes for held in self._table.objects.values()}
        for held in self._table.objects.values():
            if held.name not in wanted and held.away_bytes < held.bytes:
                self._settle(held)
                held.leave(held.bytes - held.away_bytes, keep=True)
        for held in wanted.values():
            held.come(held.away_bytes)
            held.arrive()
        yield
        for held in self._table.objects.values():
            if held.away_bytes < before[held.name]:
                self._settle(held)
                held.leave(before[held.name] - held.away_bytes, keep=True)
        for held in self._table.objects.values():
            held.come(held.away_bytes - before[held.name])

    def _needed(self, instruction: Instruction) -> list[Held]:
        if isinstance(instruction, PublishWeights):
            return self._table.read(instruction.model, by_engine=False)
        if isinstance(instruction, ReshardWeights):
            trained_here = self._state.trains(instruction.model)
            return self._table.read(instruction.model, by_engine=False) if trained_here else []
        stage = self._stage(instruction)
        model = None if stage is None else getattr(stage.op, "model", None)
        if stage is None or model not in self._state.models:
            return []
        if isinstance(stage.op, Train):
            return self._table.of_training([model])
        return self._table.read(model, isinstance(stage.op, Generate))

    def _written(self, instruction: ReshardWeights) -> list[Held]:
        generates = any(isinstance(self._state.plan.stage(r).op, Generate) for r in instruction.readers)
        return self._table.written(instruction.model, by_engine=generates)

    def _stage(self, instruction: Instruction) -> Stage | None:
        return self._state.plan.stage(instruction.stage) if isinstance(instruction, RunStage) else None

    def _settle(self, held: Held) -> None:
        """Weights that are on their way to another pool leave the device only when they have arrived."""
        for model in self._state.models:
            if held in self._table.read(model, by_engine=False):
                for channel in self._state.channels_from(model):
                    channel.settle()

    def _stays_valid(self, held: Held, step: int) -> bool:
        """Whether what is dropped is not written before it is read again: no newer version comes for the next step."""
        for channel in self._state.channels.values():
            if channel.between_pools and channel.reshard.target == self._state.pool:
                if held in self._table.read(channel.model, by_engine=True):
                    return channel.reading.of_step(step + 1) <= channel.version
        return False

    def _missing(self, instruction: Instruction, held: Held, away: int) -> RunFailure:
        stage = getattr(instruction, "stage", "") or instruction.id
        return RunFailure(
            "RLF5033",
            f"`{stage}` needs `{held.name}`, which is not on the devices of pool `{self._state.pool}`",
            notes=(f"{away} of its {held.bytes} bytes are away by the plan",),
            help=("compile the plan anew", "or set `swap = false` on the pool"),
        )
