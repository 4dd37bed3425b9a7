"""Seconds and bytes of the stages of a flow on the pools that they are placed on.

Nothing is estimated where a fact is missing: the reason is kept, so that it can be said.
"""

from __future__ import annotations

from dataclasses import field, replace

from rlflow.cost.assumed_lengths import stated_lengths
from rlflow.cost.components import FULL, MIXED, Precision
from rlflow.cost.dimensions import Dimensions, dimensions
from rlflow.cost.errors import CostError
from rlflow.cost.lengths import Fixed
from rlflow.cost.machine import Machine, machine
from rlflow.cost.roles import stage_cost
from rlflow.cost.stages import ComputeOptions, EngineOptions, Role, StageCost, Workload
from rlflow.ir.flow import Flow, Layout, Node, PoolSpec, reads_model
from rlflow.ir.ops import FrozenModel, Generate, Logprobs, ModelScore, Train, ValueModel, Values
from rlflow.passes.analysis.adapted import lora_of
from rlflow.passes.analysis.work import Work, work_of
from rlflow.passes.base import PassContext
from rlflow.values import dataclass

ROLES: dict[type, Role] = {
    Train: "train",
    Logprobs: "logprobs",
    Values: "values",
    ModelScore: "score",
    Generate: "generate",
}


@dataclass
class Costs:
    """Answers for one flow, remembered."""

    flow: Flow
    context: PassContext
    unknown: dict[str, str] = field(default_factory=dict)
    """Pool or model to what is not known about it."""
    _machines: dict[str, Machine | None] = field(default_factory=dict)
    _models: dict[str, Dimensions | None] = field(default_factory=dict)
    _factors: dict[tuple[str, str, int | None], float] = field(default_factory=dict)

    def machine(self, pool: PoolSpec) -> Machine | None:
        """The devices of a pool; None for CPUs, whose speed nobody states, and where a fact is missing."""
        if pool.name not in self._machines:
            found = None
            if pool.device == "cpu":
                self.unknown[pool.name] = "the speed and memory of CPUs are measured, not stated"
            elif pool.device != "functions":
                try:
                    found = machine(self.context.cluster, tuple(dict.fromkeys(pool.host_of_rank)))
                except CostError as error:
                    self.unknown[pool.name] = str(error)
            self._machines[pool.name] = found
        return self._machines[pool.name]

    def model(self, name: str) -> Dimensions | None:
        """The sizes of a model; None where its architecture is not known."""
        if name not in self._models:
            found = None
            architecture = self.context.architectures.get(name)
            if architecture is None:
                self.unknown[name] = f"the architecture of `{name}` is not known before it is loaded"
            else:
                try:
                    found = dimensions(architecture)
                except CostError as error:
                    self.unknown[name] = str(error)
            self._models[name] = found
        return self._models[name]

    def precision(self, name: str) -> Precision:
        """Bytes of a model's numbers: 32 bits throughout, or 16-bit weights with a 32-bit master copy in training."""
        source = self.flow.models[name].source
        while isinstance(source, FrozenModel | ValueModel):
            source = self.flow.models[source.of].source
        return FULL if source.compute == "fp32" else MIXED

    def work(self, node: Node) -> Work | None:
        model = reads_model(node.op)
        architecture = None if model is None else self.context.architectures.get(model)
        longest = None if architecture is None else architecture.facts.get("max_position_embeddings")
        return work_of(self.flow, node, longest or None)

    def cost(
        self, node: Node, layout: Layout | None = None, on: Machine | None = None, memory_bytes: int | None = None
    ) -> StageCost | None:
        """Of a model stage where it is placed, or in another layout on another machine; None where something is not
        known. `memory_bytes` is what an engine may take of a device. CostError for a layout that does not fit."""
        name, role = reads_model(node.op), ROLES.get(type(node.op))
        if name is None or role is None:
            return None
        placement = node.placement
        if layout is None and placement is not None:
            layout = placement.layout
        if on is None and placement is not None:
            on = self.machine(self.flow.pools[placement.pool])
        model, work = self.model(name), self.work(node)
        if layout is None or on is None or model is None or work is None:
            return None
        precision = self.precision(name)
        if memory_bytes is not None:
            on = replace(on, memory_bytes=memory_bytes)
        found = stage_cost(
            role,
            model,
            layout,
            on,
            workload(work),
            ComputeOptions(precision=precision),
            EngineOptions(precision=precision, memory_share=1.0),
        )
        lora = self.adapters(name)
        return found if lora is None or role != "train" else _of_adapters(found, lora, layout)

    def factor(self, node: Node, on: Machine | None = None, memory_bytes: int | None = None) -> float:
        """What the seconds of `cost` are multiplied by, since the profile has measured the stage: see
        `rlflow.passes.analysis.measured_costs`."""
        if self.context.profile is None:
            return 1.0
        from rlflow.passes.analysis.measured_costs import measured_factor

        if on is None and node.placement is not None:
            on = self.machine(self.flow.pools[node.placement.pool])
        key = (node.id, "" if on is None else on.device.name, memory_bytes)
        if key not in self._factors:
            self._factors[key] = 1.0 if on is None else measured_factor(self, node, on, memory_bytes)
        return self._factors[key]

    def adapters(self, name: str) -> int | None:
        """Parameters of a model's adapters; None where all of its weights are trained."""
        lora = lora_of(self.flow, name)
        architecture = self.context.architectures.get(name)
        if lora is None or architecture is None:
            return None
        from rlflow.reshard.adapters import adapters_of
        from rlflow.reshard.catalogue import catalogue

        return adapters_of(catalogue(architecture, mtp=False), lora).elements


def _of_adapters(cost: StageCost, parameters: int, layout: Layout) -> StageCost:
    """The training of adapters beside frozen weights: gradients and moments are theirs only, in 32 bits.

    An upper bound: on the device that holds all adapters of its pipeline stage.
    """
    mine = -(-parameters // layout.pp)
    static = replace(cost.static, gradients=4 * mine, optimizer=12 * mine)
    return replace(cost, static=static, peak_bytes=static.total)


def workload(work: Work) -> Workload:
    """The batch with the lengths that are stated or assumed: prompts of one length, responses lognormal and cut off at
    max_new."""
    return Workload(
        prompts=work.prompts,
        prompt=Fixed(work.prompt_tokens),
        response=stated_lengths(work.mean_new, work.max_new),
        samples=work.samples,
        microbatch_tokens=work.microbatch_tokens,
        minibatch=work.minibatch,
        epochs=work.epochs,
    )
