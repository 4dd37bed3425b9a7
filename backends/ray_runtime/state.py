"""What one rank holds while it executes a plan: models, data sets, reward workers, versions and cursors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime.data import DataSet, open_data
from rlflow.backends.ray_runtime.devices.cpu import Cpu
from rlflow.backends.ray_runtime.devices.device import Device
from rlflow.backends.ray_runtime.environments import EnvironmentPool
from rlflow.backends.ray_runtime.failures import blame
from rlflow.backends.ray_runtime.models import LoadedModel, derive, load_model
from rlflow.backends.ray_runtime.published import PublishCheck
from rlflow.backends.ray_runtime.reward_worker import RewardPool
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import FrozenModel, Generate, Logprobs, Take, Train, ValueModel, Values
from rlflow.plan import DataDecl, Plan, Stage

SMALL = 5_000_000
"""Parameters of all models together below which a rank computes with one thread."""


@dataclass
class ModelState:
    """One model on this rank. `version` = number of completed train calls."""

    loaded: LoadedModel
    compute: Literal["fp32", "bf16"]
    version: int = 0
    engine: RolloutEngine | None = None
    trainer: Trainer | None = None
    check: PublishCheck | None = None
    """Of a model with adapters that is sampled from."""

    def restart(self, version: int) -> None:
        """Go on from weights that were loaded into the master copy."""
        self.version = version
        if self.engine is not None:
            self.engine.load_weights(version)
            if self.check is not None:
                self.check.restart(self.engine.digest)


@dataclass
class RankState:
    """Everything stateful on one rank of one pool."""

    plan: Plan
    pool: str
    rank: int
    world: int
    base_dir: Path
    seed: int
    group: dist.ProcessGroup | None = None
    device: Device = field(default_factory=Cpu)
    models: dict[str, ModelState] = field(default_factory=dict)
    data: dict[str, DataSet] = field(default_factory=dict)
    rewards: dict[str, RewardPool] = field(default_factory=dict)
    environments: dict[str, EnvironmentPool] = field(default_factory=dict)
    cursors: dict[str, int] = field(default_factory=dict)
    """Rows taken so far from every data set's stream, over all ranks."""

    def load_models(self) -> None:
        """Load what the pool's stages use. Frozen copies and value models are made before anything trains."""
        built: dict[str, LoadedModel] = {}
        used = {declared.name: self._stages_of(declared.name) for declared in self.plan.models}
        for name, stages in used.items():
            if stages:
                with blame(stages[0].id):
                    self._build(name, built)
        for name in used:
            if self._owner(name) in built:
                self._build(name, built)
        # After all of them: a trainer also trains the value heads that were put on its model.
        for name, stages in used.items():
            if not stages:
                continue
            state = ModelState(built[name], self._compute(name))
            if any(isinstance(s.op, Generate) for s in stages):
                state.engine = RolloutEngine(state.loaded, state.compute)
                if state.loaded.adapters is not None:
                    state.check = PublishCheck(name, state.engine.digest)
            if any(isinstance(s.op, Train | Logprobs | Values) for s in stages):
                state.trainer = Trainer(state.loaded, state.compute)
            self.models[name] = state
        self._check_tokenizers()
        if sum(_parameters(model.loaded) for model in self.models.values()) < SMALL:
            # Products this small end before a second thread has woken. Worse, idle threads spin while they wait for
            # the next one: with other processes on the machine a step takes ten times as long.
            torch.set_num_threads(1)

    def _stages_of(self, model: str) -> list[Stage]:
        """The stages of this pool that compute with a model."""
        return [s for s in self.plan.stages if s.pool == self.pool and getattr(s.op, "model", None) == model]

    @property
    def has_adapters(self) -> bool:
        """Whether a trained model has adapters."""
        return any(getattr(m.source, "lora", None) is not None for m in self.plan.models if m.trainable)

    def _owner(self, model: str) -> str | None:
        """The model on whose body this one is a value head; None for a model with weights of its own."""
        source = self.plan.model(model).source
        return source.of if isinstance(source, ValueModel) and source.shared else None

    def publish(self, model: str) -> None:
        """Make the trained weights those of every reader; raises the version of all models that share them. RLF5018."""
        state = self.models[model]
        state.version += 1
        for name, other in self.models.items():
            if self._owner(name) == model:
                other.version = state.version
        if state.engine is not None:
            state.engine.load_weights(state.version)
            if state.check is not None and state.trainer is not None:
                state.check.publish(state.engine.digest, state.trainer.moved)
        if state.trainer is not None:
            state.trainer.moved = False

    def _build(self, name: str, built: dict[str, LoadedModel]) -> LoadedModel:
        """The model `name`, read or derived once."""
        if name not in built:
            source = self.plan.model(name).source
            if isinstance(source, FrozenModel | ValueModel):
                kind = "shared" if self._owner(name) is not None else source.kind
                built[name] = derive(self._build(source.of, built), kind)
            else:
                built[name] = self._on_device(load_model(source, self.base_dir))
        return built[name]

    def _on_device(self, loaded: LoadedModel) -> LoadedModel:
        """Where this rank computes, with the kernels that the device has."""
        if self.device.kind != "cpu":
            from rlflow.backends.ray_runtime.kernels.serve import serve

            loaded.model.to(self.device.torch_device)
            serve(loaded.model)
        return loaded

    def _compute(self, name: str) -> Literal["fp32", "bf16"]:
        source = self.plan.model(name).source
        return self._compute(source.of) if isinstance(source, FrozenModel | ValueModel) else source.compute

    def _check_tokenizers(self) -> None:
        """RLF5013 when a model reads token ids that another model's tokenizer made otherwise."""
        for stage in self.plan.stages:
            reader = self.models.get(getattr(stage.op, "model", ""))
            if reader is None or isinstance(stage.op, Generate):
                continue
            for writer in sorted(self._writers(stage.inputs.get("samples", ""))):
                ours, theirs = reader.loaded.tokenizer, self.models[writer].loaded.tokenizer
                if ours is not theirs and ours.get_vocab() != theirs.get_vocab():
                    raise RunFailure(
                        "RLF5013",
                        f"`{stage.op.model}` reads the tokens of `{writer}`, and their tokenizers differ",  # type: ignore[union-attr]
                        help=("use checkpoints of one model family", "or score the text with a Python reward"),
                    )

    def _writers(self, stage_id: str) -> set[str]:
        """Models that sampled what a stage gives."""
        if not stage_id:
            return set()
        stage = self.plan.stage(stage_id)
        if isinstance(stage.op, Generate):
            return {stage.op.model} if stage.op.model in self.models else set()
        return self._writers(stage.inputs.get("samples") or stage.inputs.get("rows") or "")

    def load_data(self) -> None:
        """Open every data set and turn its prompts into the ids of the model that answers them."""
        for declared in self.plan.data:
            readers = self._answering_models(declared.name)
            if not readers:
                continue
            with blame(self._first_take(declared.name)):
                self.data[declared.name] = self._open(declared, readers)
            self.cursors[declared.name] = 0
        for environment in self.plan.environments:
            if any(getattr(stage.op, "environment", None) == environment.name for stage in self.plan.stages):
                pool = EnvironmentPool(environment.name, environment.source, self.base_dir)
                pool.open()
                self.environments[environment.name] = pool

    def _first_take(self, data: str) -> str:
        return next(s.id for s in self.plan.stages if isinstance(s.op, Take) and s.op.data == data)

    def _open(self, declared: DataDecl, readers: dict[str, int]) -> DataSet:
        """One data set, rendered for the model that answers it."""
        data_set = open_data(declared.source, self.base_dir, declared.name)
        if len(readers) > 1:
            raise RunFailure(
                "RLF4003",
                f"data `{declared.name}` is answered by several models: {', '.join(sorted(readers))}",
                help=("declare the data once for each model",),
            )
        model, longest = next(iter(readers.items()))
        loaded = self.models[model].loaded
        data_set.render(loaded.tokenizer, loaded.context - longest)
        return data_set

    def _answering_models(self, data: str) -> dict[str, int]:
        """Models that generate from this data set's prompts, each with its largest max_new (tokens)."""
        found: dict[str, int] = {}
        for stage in self.plan.stages:
            if isinstance(stage.op, Generate):
                source = self.plan.stage(stage.inputs["prompts"]).op
                if isinstance(source, Take) and source.data == data:
                    found[stage.op.model] = max(stage.op.max_new, found.get(stage.op.model, 0))
        return found

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()
        for environment in self.environments.values():
            environment.close()

    def total_steps(self) -> int:
        """Steps that the plan's stop rule means with these data sets."""
        if self.plan.stop.steps is not None:
            return self.plan.stop.steps
        counts: dict[str, int] = {}
        for stage in self.plan.stages:
            if isinstance(stage.op, Take) and stage.op.count is not None and stage.phase == "step":
                counts[stage.op.data] = counts.get(stage.op.data, 0) + stage.op.count
        epochs = self.plan.stop.epochs or 1
        # The last, smaller part of an epoch is filled up from the next one, so no row is left out.
        steps = [-(-epochs * len(self.data[name]) // count) for name, count in counts.items()]
        return max(steps, default=1)


def _parameters(loaded: LoadedModel) -> int:
    return sum(parameter.numel() for parameter in loaded.model.parameters())
