"""What one rank holds while it executes a plan: models, data sets, reward workers, versions and cursors."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from rlflow.backends.ray_runtime.data import DataSet, open_data
from rlflow.backends.ray_runtime.models import LoadedModel, load_model
from rlflow.backends.ray_runtime.reward_worker import RewardPool
from rlflow.backends.ray_runtime.rollout import RolloutEngine
from rlflow.backends.ray_runtime.trainer import Trainer
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import FrozenModel, Generate, Logprobs, Take, Train
from rlflow.plan import Plan


@dataclass
class ModelState:
    """One model on this rank. `version` = number of completed train calls."""

    loaded: LoadedModel
    compute: Literal["fp32", "bf16"]
    version: int = 0
    engine: RolloutEngine | None = None
    trainer: Trainer | None = None


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
    models: dict[str, ModelState] = field(default_factory=dict)
    data: dict[str, DataSet] = field(default_factory=dict)
    rewards: dict[str, RewardPool] = field(default_factory=dict)
    cursors: dict[str, int] = field(default_factory=dict)
    """Rows taken so far from every data set's stream, over all ranks."""

    def load_models(self) -> None:
        """Load what the pool's stages use. A frozen copy is taken before anything trains."""
        wanted = {
            name: [s for s in self.plan.stages if s.pool == self.pool and getattr(s.op, "model", None) == name]
            for name in (m.name for m in self.plan.models)
        }
        sources: dict[str, LoadedModel] = {}
        for declared in self.plan.models:
            stages = wanted[declared.name]
            if not stages:
                continue
            source = declared.source
            base = declared.name
            while isinstance(source, FrozenModel):
                base = source.of
                source = self.plan.model(base).source
            if base not in sources:
                sources[base] = load_model(source, self.base_dir)
            loaded = sources[base]
            if declared.name != base:
                loaded = copy.copy(loaded)
                loaded.model = copy.deepcopy(loaded.model).requires_grad_(False)
            state = ModelState(loaded, source.compute)
            if any(isinstance(s.op, Generate) for s in stages):
                state.engine = RolloutEngine(loaded, source.compute)
            if any(isinstance(s.op, Train | Logprobs) for s in stages):
                state.trainer = Trainer(loaded, source.compute)
            self.models[declared.name] = state

    def load_data(self) -> None:
        """Open every data set and turn its prompts into the ids of the model that answers them."""
        for declared in self.plan.data:
            readers = self._answering_models(declared.name)
            if not readers:
                continue
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
            self.data[declared.name] = data_set
            self.cursors[declared.name] = 0

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
