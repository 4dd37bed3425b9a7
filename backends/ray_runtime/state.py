"""What one rank holds while it executes a plan: models, data sets, reward workers, versions and cursors."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from rlflow.backends.ray_runtime.data import DataSet, open_data
from rlflow.backends.ray_runtime.devices.cpu import Cpu
from rlflow.backends.ray_runtime.devices.device import Device
from rlflow.backends.ray_runtime.devices.swap import own_memory
from rlflow.backends.ray_runtime.engine import Ends
from rlflow.backends.ray_runtime.environments import EnvironmentPool
from rlflow.backends.ray_runtime.failures import blame
from rlflow.backends.ray_runtime.frozen_weights import cast_frozen
from rlflow.backends.ray_runtime.merged_adapters import known_adapters
from rlflow.backends.ray_runtime.models import LoadedModel, derive, load_model
from rlflow.backends.ray_runtime.open_channel import compute_of, open_channel, tensors_of
from rlflow.backends.ray_runtime.parallel.mesh import Mesh
from rlflow.backends.ray_runtime.published import PublishCheck
from rlflow.backends.ray_runtime.reshard_links import Tensors
from rlflow.backends.ray_runtime.reward_worker import RewardPool
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.backends.ray_runtime.saving.ahead import Ahead
from rlflow.backends.ray_runtime.saving.owned import Owned
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.backends.ray_runtime.weight_channel import WeightChannel
from rlflow.backends.ray_runtime.world import World
from rlflow.cost.draws import LengthSampler
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import FrozenModel, Generate, Logprobs, ModelScore, Take, Train, ValueModel, Values
from rlflow.plan import DataDecl, Plan, Stage

SMALL = 5_000_000
"""Parameters of all models together below which a rank computes with one thread."""


@dataclass
class ModelState:
    """One model on this rank. `version` = number of completed train calls."""

    loaded: LoadedModel
    compute: Literal["fp32", "bf16"]
    config: PretrainedConfig
    """Of the whole model."""
    parameters: int
    """Of the whole model."""
    version: int = 0
    engine: RolloutEngine | None = None
    trainer: Trainer | None = None
    engine_mesh: Mesh | None = None
    engine_fed: bool = False
    """The engine's weights come by a reshard."""
    engine_own: bool = False
    """The engine has a copy of the weights, in which nothing is shared with the trainer's."""
    mesh: Mesh | None = None
    """Of the trainer; None where every rank has the whole model and rows of its own."""
    check: PublishCheck | None = None
    """Of a model with adapters that is sampled from."""
    frozen: str = ""
    """Of a model with adapters that leave this pool or layout, or come from another: `Adapters.fingerprint`."""

    def renew_engine(self, version: int) -> None:
        """Give the engine the weights of the trainer on this rank, which has the same parts."""
        assert self.engine is not None
        if not self.engine_own:
            self.engine.load_weights(version)
            return
        assert self.trainer is not None
        source = self.trainer.local_tensors()

        def copy(target: Tensors) -> None:
            with torch.no_grad():
                for name, tensor in target.items():
                    tensor.copy_(source[name])

        self.update_engine(version, copy)

    def update_engine(self, version: int, bring: Callable[[Tensors], None]) -> None:
        """Let `bring` write the engine's weights, or the adapters that it adds to them."""
        assert self.engine is not None
        self.engine.begin_update(version)
        tensors = self.engine.incoming()
        bring(tensors)
        self.engine.update(tensors)
        self.engine.end_update()

    def restart(self, version: int) -> None:
        """Go on from weights that were loaded into the master copy."""
        self.version = version
        if self.engine is None:
            return
        if not self.engine_fed:
            self.renew_engine(version)
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
    """Of the pool; None for a pool of one rank."""
    all: World = field(init=False)
    """All pools of the run."""
    channels: dict[str, WeightChannel] = field(default_factory=dict)
    """This rank's ends of the plan's reshards, by id."""
    device: Device = field(default_factory=Cpu)
    models: dict[str, ModelState] = field(default_factory=dict)
    data: dict[str, DataSet] = field(default_factory=dict)
    rewards: dict[str, RewardPool] = field(default_factory=dict)
    environments: dict[str, EnvironmentPool] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Of the data sets of all pools."""
    cursors: dict[str, int] = field(default_factory=dict)
    """Rows taken so far from every data set's stream, over all ranks."""
    lengths: Mapping[str, LengthSampler] = field(default_factory=dict)
    """Of the responses of a stage, where they are imposed."""
    ahead: Ahead = field(init=False)
    owned: dict[str, Owned] = field(default_factory=dict)
    """What else of this pool goes into a checkpoint, by name."""
    stream_cursors: dict[str, Any] = field(default_factory=dict)
    """Of a resumed run: data cursors by the streamed stage (`streams`)."""

    def __post_init__(self) -> None:
        self.all = World(self.pool, self.rank, {self.pool: self.world}, group=self.group)
        self.ahead = Ahead.of(self.plan, self.pool)

    def join(self, world: World) -> None:
        """Take part in a run of several ranks, whose groups are connected."""
        self.all, self.group = world, world.group

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
            self.models[name] = self._model_state(name, built[name], stages)
        self._share_frozen()
        self._connect_weights()
        cast_frozen(self)
        self._check_tokenizers()
        if sum(model.parameters for model in self.models.values()) < SMALL:
            # Products this small end before a second thread has woken. Worse, idle threads spin while they wait for
            # the next one: with other processes on the machine a step takes ten times as long.
            torch.set_num_threads(1)

    def _share_frozen(self) -> None:
        """A frozen copy of a model with adapters is cut like it, from the same tensors: one part is enough."""
        for name, state in self.models.items():
            source = self.plan.model(name).source
            if not isinstance(source, FrozenModel) or source.of not in self.models or state.trainer is None:
                continue
            of = self.models[source.of]
            if of.loaded.adapters is not None and of.trainer is not None and of.mesh is not None:
                state.trainer.sharded.share(of.trainer.sharded)

    def _model_state(self, name: str, loaded: LoadedModel, stages: list[Stage]) -> ModelState:
        """What samples from the model and what trains it or predicts with it, each in its layout."""
        state = ModelState(loaded, compute_of(self.plan, name), loaded.model.config, _parameters(loaded))
        if loaded.adapters is not None and any(r.model == name and r.adapters for r in self.plan.reshards):
            with blame(stages[0].id):
                known_adapters(loaded.adapters, tensors_of(state.config))
            state.frozen = loaded.adapters.fingerprint()
        samplers = [s for s in stages if isinstance(s.op, Generate)]
        others = [s for s in stages if isinstance(s.op, Train | Logprobs | Values | ModelScore)]
        if samplers:
            mesh = self._mesh(samplers)
            self._make_engine(name, state, mesh, alone=not others, fed=self._fed_by_reshard(samplers[0], others))
        if others:
            state.mesh = self._mesh(others)
            if any(not isinstance(s.op, ModelScore) for s in others):
                state.trainer = Trainer(loaded, state.compute, state.mesh)
        return state

    def _fed_by_reshard(self, sampler: Stage, others: list[Stage]) -> bool:
        """Whether the weights to sample from come by a reshard, into a copy that nothing else on this pool uses."""
        shared = {stage.id for stage in others}
        return any(sampler.id in r.readers and not shared & set(r.readers) for r in self.plan.reshards)

    def _make_engine(self, name: str, state: ModelState, mesh: Mesh | None, *, alone: bool, fed: bool) -> None:
        """Before the trainer, which cuts the model that both were made from."""
        loaded = state.loaded
        own = fed or mesh is not None
        wait = self.all.timeout.total_seconds()
        state.engine = RolloutEngine(loaded, state.compute, mesh, own=own, wait_seconds=wait)
        state.engine_mesh, state.engine_fed, state.engine_own = mesh, fed, own
        if loaded.adapters is not None:
            state.check = PublishCheck(name, state.engine.digest)
        if alone and own:
            state.loaded = state.engine.loaded  # the copy in float32 is not needed any more

    def _mesh(self, stages: list[Stage]) -> Mesh | None:
        """The mesh of stages that use one copy of a model. RLF4003 where their layouts differ."""
        first = stages[0]
        assert first.layout is not None
        for stage in stages[1:]:
            if stage.layout != first.layout:
                raise RunFailure(
                    "RLF4003",
                    f"`{first.id}` and `{stage.id}` use one model on one pool in two layouts",
                    stage=stage.id,
                    help=("place them with the same layout, or on pools of their own",),
                )
        mapping = next((r.mapping for r in self.plan.reshards if r.source == r.target and first.id in r.readers), ())
        return self.all.mesh(first.layout, mapping, first.id)

    def _connect_weights(self) -> None:
        """This rank's ends of all reshards, in the order of the plan, which all ranks share."""
        for reshard in self.plan.reshards:
            if self.pool in (reshard.source, reshard.target):
                with blame(reshard.readers[0]):
                    config, device = self.models[reshard.model].config, self.device.torch_device
                    frozen = self.models[reshard.model].frozen
                    self.channels[reshard.id] = open_channel(self.plan, reshard, self.all, config, device, frozen)

    def _stages_of(self, model: str) -> list[Stage]:
        """The stages of this pool that compute with a model."""
        return [s for s in self.plan.stages if s.pool == self.pool and getattr(s.op, "model", None) == model]

    def ends(self, stage: str) -> Ends | None:
        """Where the samples of a stage end, if that is imposed: by the place of their prompts in the data's order."""
        sampler = self.lengths.get(stage)
        if sampler is None:
            return None

        def drawn(uid: np.ndarray, sample: np.ndarray) -> np.ndarray:
            pairs = zip(uid.tolist(), sample.tolist(), strict=True)
            return np.array([sampler.tokens(0, prompt, number) for prompt, number in pairs], dtype=np.int64)

        return drawn

    def trains(self, model: str) -> bool:
        """Whether this pool trains the model."""
        return any(isinstance(stage.op, Train) for stage in self._stages_of(model))

    @property
    def has_adapters(self) -> bool:
        """Whether a trained model has adapters."""
        return any(getattr(m.source, "lora", None) is not None for m in self.plan.models if m.trainable)

    def _owner(self, model: str) -> str | None:
        """The model on whose body this one is a value head; None for a model with weights of its own."""
        source = self.plan.model(model).source
        return source.of if isinstance(source, ValueModel) and source.shared else None

    def channels_from(self, model: str) -> list[WeightChannel]:
        """The channels to other pools of a model that trains here."""
        found = [channel for channel in self.channels.values() if channel.model == model and channel.between_pools]
        return [channel for channel in found if channel.reshard.source == self.pool]

    def before_update(self, model: str) -> float:
        """Weights that are on their way to another pool must leave before they change. Seconds that it took."""
        started = time.monotonic()
        for channel in self.channels_from(model):
            channel.before_update()
        return time.monotonic() - started

    def receive(self, model: str, readers: tuple[str, ...], step: int, evaluation: bool) -> float:
        """Execute a `reshard` instruction: bring the readers' weights to the version that they use at this step.
        Seconds that this rank waited for another pool to give them."""
        channel = next(c for c in self.channels.values() if c.model == model and set(c.reshard.readers) == set(readers))
        state = self.models[model]
        if channel.between_pools:
            wanted = step if evaluation else channel.reading.of_step(step)
            if wanted > channel.version:
                self.deliver(channel, wanted, lambda tensors: channel.receive(wanted, tensors))
                return channel.moved.waited_s
        elif channel.version < state.version:
            assert state.trainer is not None
            source, version = state.trainer.local_tensors(), state.version
            self.deliver(channel, version, lambda tensors: channel.move(source, tensors, version))
        return 0.0

    def deliver(self, channel: WeightChannel, version: int, bring: Callable[[Tensors], None]) -> None:
        """Let a channel write the tensors of its readers."""
        state = self.models[channel.model]
        if all(isinstance(self.plan.stage(reader).op, Generate) for reader in channel.reshard.readers):
            assert state.engine is not None
            state.update_engine(version, bring)
            if state.check is not None:
                state.check.publish(state.engine.digest, state.engine.changed)
        else:
            assert state.trainer is not None
            bring(state.trainer.local_tensors())
            if state.engine is not None and not state.engine_fed:
                state.renew_engine(version)
        if channel.between_pools:
            state.version = version

    def drain(self, end: int) -> None:
        """The run ends after step `end`, sooner than planned: no weights may be left on their way."""
        for channel in self.channels.values():
            if channel.reading.streamed:
                continue  # its thread takes what is on its way
            for version in channel.left(end):
                self.deliver(channel, version, functools.partial(channel.receive, version))

    def publish(self, model: str) -> None:
        """Make the trained weights those of every reader; raises the version of all models that share them. RLF5018."""
        state = self.models[model]
        state.version += 1
        for channel in self.channels_from(model):
            assert state.trainer is not None
            channel.published(state.version, state.trainer.local_tensors)
        for name, other in self.models.items():
            if self._owner(name) == model:
                other.version = state.version
        if state.engine is not None and not state.engine_fed:
            state.renew_engine(state.version)
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
        if any(memory.pool == self.pool for memory in self.plan.memory):
            own_memory(loaded.model.parameters())
        return loaded

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
            if not readers or not self._takes(declared.name):
                continue
            with blame(self._first_take(declared.name)):
                self.data[declared.name] = self._open(declared, readers)
            self.cursors[declared.name] = 0
        for environment in self.plan.environments:
            stages = [stage for stage in self.plan.stages if stage.pool == self.pool]
            if any(getattr(stage.op, "environment", None) == environment.name for stage in stages):
                pool = EnvironmentPool(environment.name, environment.source, self.base_dir)
                pool.open()
                self.environments[environment.name] = pool

    def _takes(self, data: str) -> bool:
        """Whether this pool takes rows of the data set."""
        return any(isinstance(s.op, Take) and s.op.data == data and s.pool == self.pool for s in self.plan.stages)

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
        if model not in self.models:
            raise RunFailure(
                "RLF4003",
                f"data `{declared.name}` is taken on pool `{self.pool}` and answered by `{model}`, which is not there",
                help=("place the stage that takes the data with the one that generates",),
            )
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
