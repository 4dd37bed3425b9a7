"""The names of a plan's memory table, each with what a rank holds under it. See held_objects.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rlflow.backends.ray_runtime.held_objects import Held, Tensors, beside, moments, parameters
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.backends.ray_runtime.state import ModelState, RankState
from rlflow.ir.ops import Generate
from rlflow.plan import Instruction, MoveObject, RunStage, Stage
from rlflow.plan_decisions import PoolMemory

CACHE: Final = " keys and values"


@dataclass
class Cache:
    """Keys and values of a generate stage. The embedded engine has none between its calls."""

    engine: RolloutEngine
    whole: int
    """Planned bytes."""
    away: int = 0


class HeldTable:
    """Of one rank. Objects that two names share belong to the first."""

    def __init__(self, state: RankState, memory: PoolMemory, master_in_optimizer: bool = True) -> None:
        self._state = state
        self._master_in_optimizer = master_in_optimizer
        self._whole: dict[str, int] = {}
        for phase in memory.phases:
            for name, size in phase.contents:
                self._whole[name] = max(size, self._whole.get(name, 0))
        self.objects: dict[str, Held] = {}
        self._read: dict[tuple[str, bool], list[Held]] = {}
        self._written: dict[str, list[Held]] = {}
        self._optimizers: dict[str, Held] = {}
        self._sources: list[Tensors] = []
        names = sorted(state.models, key=lambda name: not state.trains(name))
        for name in names:
            self._add(name, state.models[name])
            if _is_given_adapters(state.models[name]):
                self._add_sums(name, state.models[name])
        self.caches: dict[str, Cache] = {}
        for stage in state.plan.stages:
            engine, whole = self.engine(stage), self._whole.get(f"{stage.id}{CACHE}", 0)
            if engine is not None and whole:
                self.caches[f"{stage.id}{CACHE}"] = Cache(engine, whole)
                engine.cache_limit_bytes = max(whole, engine.cache_limit_bytes or 0)

    def engine(self, stage: Stage) -> RolloutEngine | None:
        """The engine of a generate stage of this pool."""
        if not isinstance(stage.op, Generate) or stage.pool != self._state.pool:
            return None
        return self._state.models[stage.op.model].engine

    def read(self, model: str, by_engine: bool) -> list[Held]:
        """What a stage that does not train the model reads of it."""
        return self._read.get((model, by_engine), [])

    def written(self, model: str, by_engine: bool) -> list[Held]:
        """What a reshard writes of it, and reads on the way."""
        return self._written.get(model) or self.read(model, by_engine)

    def of_training(self, models: Sequence[str]) -> list[Held]:
        """Weights and optimizers."""
        found = [held for model in models for held in self.read(model, by_engine=False)]
        return found + [self._optimizers[model] for model in models if model in self._optimizers]

    def _add(self, name: str, model: ModelState) -> None:
        trains, trainer = self._state.trains(name), model.trainer
        own = model.engine if model.engine is not None and model.engine.own_bytes(awake=True) else None
        if _is_given_adapters(model):
            own = None  # see `_add_sums`
        weights, of_engine = self._names(name, trains)
        apart = of_engine != weights and own is not None and trainer is not None
        mine = self._unshared(lambda: [] if trainer is None else parameters(trainer))
        fixed = not trains and not any(channel.model == name for channel in self._state.channels.values())
        if trainer is None or not trains:
            held = self._hold(weights, mine, None if apart else own, fixed)
            self._read[name, False] = self._read[name, True] = held
            if apart:
                self._read[name, True] = self._hold(of_engine, list, own, fixed)
            return
        kept = self._unshared(lambda: moments(trainer))
        if self._master_in_optimizer and model.compute == "bf16" and own is not None and not apart:
            # The cost model's 16-bit weights are the engine's; the trainer's are the optimizer's master copy.
            copy = self._hold(weights, list, own)
            master = self._hold(f"{name} optimizer", lambda: [*mine(), *kept()])
            self._read[name, True], self._read[name, False] = copy, [*copy, *master]
        else:
            held = self._hold(weights, mine, None if apart else own)
            master = self._hold(f"{name} optimizer", kept)
            self._read[name, False] = self._read[name, True] = held
            if apart:
                self._read[name, True] = self._hold(of_engine, list, own)
        if master:
            self._optimizers[name] = master[0]

    def _add_sums(self, name: str, model: ModelState) -> None:
        """Of an engine whose adapters come by a reshard. A and B themselves are small, and stay."""
        assert model.engine is not None
        parts = model.engine.parts()
        assert parts is not None
        rest, under, sums = parts
        frozen = self._hold(f"{name} frozen weights", lambda: rest, fixed=True)
        below = self._hold(f"{name} weights under adapters", lambda: under, fixed=True)
        merged = self._hold(f"{name} merged weights", lambda: sums)
        self._read[name, True] = [*frozen, *merged]
        self._written[name] = [*below, *merged]

    def _names(self, model: str, trains: bool) -> tuple[str, str]:
        """What the table calls the trainer's and the engine's copy: two names where their layouts differ, which the
        first stage that uses a model without training here takes first."""
        first, second = f"{model} weights", f"{model} rollout weights" if trains else f"{model} weights 2"
        if second not in self._whole:
            return first, first
        if trains:
            return first, second
        program = self._state.plan.program(self._state.pool).step
        stages = [self._state.plan.stage(i.stage) for i in program if isinstance(i, RunStage)]
        users = [stage for stage in stages if getattr(stage.op, "model", None) == model]
        return (second, first) if users and isinstance(users[0].op, Generate) else (first, second)

    def _hold(
        self, name: str, tensors: Tensors, engine: RolloutEngine | None = None, fixed: bool = False
    ) -> list[Held]:
        """Under a name of the table; nothing under another, which never moves."""
        if name not in self._whole:
            return []
        self.objects[name] = Held(name, self._whole[name], self._state.device, tensors, engine, fixed)
        return [self.objects[name]]

    def _unshared(self, tensors: Tensors) -> Tensors:
        others = list(self._sources)
        self._sources.append(tensors)
        return beside(tensors, others)


def _is_given_adapters(model: ModelState) -> bool:
    return model.engine_fed and model.engine is not None and model.engine.parts() is not None


def at_start(program: Iterable[Instruction]) -> dict[str, int]:
    """Bytes of every object that are away when a step begins, which is how the step before left it: an object is whole
    where the most of it is there, and what a reshard writes is gone since its last use."""
    level: dict[str, int] = {}
    most: dict[str, int] = {}
    for instruction in program:
        if isinstance(instruction, MoveObject):
            name = instruction.object
            level[name] = level.get(name, 0) + (
                instruction.bytes if instruction.kind == "onload" else -instruction.bytes
            )
            most[name] = max(most.get(name, 0), level[name])
    return {name: most[name] if level[name] >= 0 else -level[name] for name in level}
