"""The plan: what a compile decides and a backend executes, as one canonical JSON file.

A plan is a value. `Plan.to_json()` has sorted keys and no timestamps, so the same input gives the same bytes. Unknown
keys are errors, and a plan of another major format version is refused. Ops and declarations are the dataclasses of
`rlflow.ir.ops`, stored as they are.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from rlflow.ir.ops import (
    DatasetScorer,
    DataSource,
    EnvironmentSource,
    FrozenModel,
    ModelSource,
    Op,
    RewardSource,
    ValueModel,
)
from rlflow.notebook import Shown
from rlflow.plan_decisions import (
    Cadence,
    Choice,
    Pinned,
    PoolMemory,
    Reshard,
    Search,
    StageEstimate,
)
from rlflow.plan_parts import PlanPart, SpanRef

FORMAT: Final = "rlflow.plan"
FORMAT_VERSION = "1.0"
COLLECTIVE_TIMEOUT_S: Final = 1800
"""What HCCL and torch.distributed's gloo wait for by default; ranks may be further apart where a stage takes long."""


Reason = Literal[
    "written",
    "weights-changed",
    "old-logprobs",
    "several-pools",
    "asynchronous-call",
    "keep-progress",
    "other-pool",
    "other-layout",
    "memory",
]


class Because(PlanPart):
    """Why an instruction or stage is there. `written` = the user wrote it; the others were inserted by a pass."""

    reason: Reason
    span: SpanRef
    inserted_by: str = ""
    """The pass; empty when written."""


class Source(PlanPart):
    """A file the plan was made from."""

    path: str
    sha256: str


DataSourceField = Annotated[DataSource, Field(discriminator="kind")]
ModelSourceField = Annotated[ModelSource, Field(discriminator="kind")]
RewardSourceField = Annotated[RewardSource, Field(discriminator="kind")]
OpField = Annotated[Op, Field(discriminator="kind")]


class DataDecl(PlanPart):
    name: str
    source: DataSourceField
    span: SpanRef


class ModelDecl(PlanPart):
    name: str
    source: ModelSourceField
    trainable: bool
    span: SpanRef


class RewardDecl(PlanPart):
    name: str
    source: RewardSourceField
    span: SpanRef


class EnvironmentDecl(PlanPart):
    name: str
    source: EnvironmentSource
    span: SpanRef


class Layout(PlanPart):
    """Sharding of a model stage over its pool, as `rlflow.ir.flow.Layout` explains it."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    etp: int = 1
    vp: int = 1
    split: tuple[int, ...] = ()
    sp: bool = False
    zero: int = 0
    recompute: Literal["none", "selective", "full"] = "none"


class RankPlace(PlanPart):
    rank: int
    host: str
    index: int
    """Logical device index on the host."""


class Pool(PlanPart):
    """A named set of devices. `functions` pools hold CPU workers for Python stages and have no instruction list."""

    name: str
    device: Literal["cpu", "npu", "cuda", "functions"]
    ranks: tuple[RankPlace, ...]


class Stage(PlanPart):
    """One node of the flow, placed."""

    id: str
    op: OpField
    phase: str
    """`step`, or the name of an evaluation."""
    pool: str
    layout: Layout | None = None
    """None for stages without a model."""
    kv_copies: int = 1
    """Ranks that hold every key-value head, where attention is cut over more ranks than there are heads."""
    inputs: dict[str, str]
    """Port to the stage that produces it."""
    output: str
    """The type of the rows it gives, as text."""
    because: Because


class TakeRows(PlanPart):
    """Bring the stage's rows in: from a data set's cursor."""

    kind: Literal["take"] = "take"
    id: str
    stage: str
    queue: str = ""
    """The queue that another pool fills; empty = the data set of the stage."""
    because: Because


class PutRows(PlanPart):
    """Hand the stage's result to a queue that another pool takes from."""

    kind: Literal["put"] = "put"
    id: str
    stage: str
    queue: str
    because: Because


class ReshardWeights(PlanPart):
    """Bring the newest permitted version of a model's weights from the layout that trains to the one that reads."""

    kind: Literal["reshard"] = "reshard"
    id: str
    model: str
    readers: tuple[str, ...]
    """The stages that read in the layout that is made."""
    because: Because


class RunStage(PlanPart):
    """Run the stage. On a stage of a `functions` pool the call starts and returns; a `wait` collects it."""

    kind: Literal["run"] = "run"
    id: str
    stage: str
    because: Because


class WaitStage(PlanPart):
    """Block until the asynchronous stage's result is there."""

    kind: Literal["wait"] = "wait"
    id: str
    stage: str
    because: Because


class PublishWeights(PlanPart):
    """Make the trained weights the ones every reader of the channel uses; raises the model's version by one."""

    kind: Literal["publish"] = "publish"
    id: str
    model: str
    because: Because


class MoveObject(PlanPart):
    """Move one object of every device of the pool: to the host's memory, back, or away. What was dropped comes back
    empty: an `onload` that is not `from_host` only makes room for it. A `save` copies to the host's memory like an
    `offload`, but leaves the object where it is, for the `reshard` after it to overwrite in place."""

    kind: Literal["offload", "onload", "drop", "save"]
    id: str
    object: str
    """As the memory table names it."""
    bytes: int
    """On one device."""
    from_host: bool = True
    us: int
    """Microseconds on the link, by the cost model."""
    exposed_us: int
    """The part that no stage hides."""
    because: Because


class SaveCheckpoint(PlanPart):
    """Write a checkpoint after every `every`-th step; 0 = only when the run ends or is interrupted."""

    kind: Literal["checkpoint"] = "checkpoint"
    id: str
    every: int
    because: Because


Instruction = Annotated[
    TakeRows | PutRows | RunStage | WaitStage | ReshardWeights | PublishWeights | MoveObject | SaveCheckpoint,
    Field(discriminator="kind"),
]


class Evaluation(PlanPart):
    """An instruction list run before the first step, after every `every`-th step (0 = never between) and at the end."""

    name: str
    every: int
    instructions: tuple[Instruction, ...]


class Program(PlanPart):
    """What the ranks of one pool execute."""

    pool: str
    step: tuple[Instruction, ...]
    evaluations: tuple[Evaluation, ...] = ()


class StaleReader(PlanPart):
    """As `rlflow.ir.decisions.Stale` explains it."""

    stage: str
    steps: int
    permitted: int
    admit: Literal["in_order", "wait", "slack_edf", "evict", "count"]
    burst: int = 1
    trigger: float = 1.0
    carry: Literal["partial", "finish", "nothing"] = "finish"
    guarantee: Literal["per_sample", "aggregate"]
    worst_age: int | None
    """steps; None = no sample has a bound"""
    drops_data: bool = False
    updates: int = 1
    span: SpanRef


class Channel(PlanPart):
    """A weight edge: from the stage that trains a model to the stages that read it."""

    model: str
    source: str
    """The training stage."""
    readers: tuple[str, ...]
    max_staleness: int
    """steps"""
    updates: int = 1
    """Optimizer updates in one step, at most."""
    stale: tuple[StaleReader, ...] = ()
    """The readers that may use older weights, and what is promised about the age of their samples."""
    transport: Literal["alias", "cast", "merge", "reshard"]
    """alias: readers use the trained tensors themselves. cast: readers hold a copy in the compute precision. merge:
    readers hold the frozen weights with the adapters added to them, in the compute precision. reshard:
    some reader has another pool or layout, and its ranks receive their parts."""


class Queue(PlanPart):
    """A data edge between pools. `capacity` in batches: one being filled, and one for every step of staleness."""

    id: str
    stage: str
    """Whose result it carries."""
    source: str
    target: str
    """Pools."""
    capacity: int
    reads: int
    """Reads of one batch: one per model-parallel replica of the target pool."""
    partitions: int = 1
    """Parts of a batch that are written and read independently: one per data-parallel replica that writes."""
    trigger: float = 1.0
    """Share of a batch at which the target may start."""
    carry: Literal["partial", "finish", "nothing"] = "finish"
    span: SpanRef


class Stop(PlanPart):
    steps: int | None
    epochs: int | None


class Plan(Shown, PlanPart):
    format: Literal["rlflow.plan"] = FORMAT
    format_version: str = FORMAT_VERSION
    rlflow_version: str
    flow: str
    cluster: str
    """Name of the cluster the plan is for; `local` = this machine."""
    sources: tuple[Source, ...]
    overrides: tuple[str, ...] = ()
    profile: Source | None = None
    """The measured table that estimates come from; None = all are by the cost model."""
    pipeline: str
    """The passes that made it, in order."""
    seed: int
    stop: Stop
    data: tuple[DataDecl, ...]
    models: tuple[ModelDecl, ...]
    rewards: tuple[RewardDecl, ...]
    environments: tuple[EnvironmentDecl, ...] = ()
    pools: tuple[Pool, ...]
    stages: tuple[Stage, ...]
    programs: tuple[Program, ...]
    channels: tuple[Channel, ...]
    queues: tuple[Queue, ...] = ()
    reshards: tuple[Reshard, ...] = ()
    memory: tuple[PoolMemory, ...] = ()
    estimates: tuple[StageEstimate, ...] = ()
    cadence: Cadence | None = None
    """None where something about a stage's time is not known."""
    collective_timeout_s: int = COLLECTIVE_TIMEOUT_S
    """How long a rank waits in a collective for the others, on all ranks: twice the longest stage, and at least the
    default of the libraries."""
    pinned: tuple[Pinned, ...] = ()
    choices: tuple[Choice, ...] = ()
    search: Search | None = None
    """None where the schedule left nothing to search for."""

    def to_json(self) -> str:
        """Canonical text: sorted keys, two-space indent, final newline."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=2, ensure_ascii=False) + "\n"

    def stage(self, stage_id: str) -> Stage:
        """The stage of that id; KeyError when there is none."""
        for stage in self.stages:
            if stage.id == stage_id:
                return stage
        raise KeyError(stage_id)

    def model(self, name: str) -> ModelDecl:
        """The model declaration of that name; KeyError when there is none."""
        for model in self.models:
            if model.name == name:
                return model
        raise KeyError(name)

    def program(self, pool: str) -> Program:
        """What the ranks of a pool execute; KeyError when it executes nothing."""
        for program in self.programs:
            if program.pool == pool:
                return program
        raise KeyError(pool)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan; ValueError (pydantic's ValidationError included) when it is not one this version reads."""
        try:
            raw: Any = json.loads(text)
        except RecursionError:
            raise ValueError("not an rlflow plan: nested too deeply") from None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError("not an rlflow plan: the key `format` is not `rlflow.plan`")
        version = str(raw.get("format_version", ""))
        if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
            raise ValueError(f"plan format {version or 'unknown'} is not readable; this rlflow reads {FORMAT_VERSION}")
        plan = cls.model_validate(raw)
        broken = plan.broken_references()
        if broken:
            raise ValueError("not a sound plan: " + "; ".join(broken[:3]))
        return plan

    def broken_references(self) -> list[str]:
        """Names that the plan uses and does not define, in words; empty for every plan that a compile makes."""
        names = {
            "data set": {d.name for d in self.data},
            "model": {m.name for m in self.models},
            "reward": {r.name for r in self.rewards},
            "pool": {p.name for p in self.pools},
            "stage": {s.id for s in self.stages},
        }
        used: list[tuple[str, str, str]] = []  # who, what kind, which name
        for stage in self.stages:
            used.append((f"stage {stage.id}", "pool", stage.pool))
            used += [(f"stage {stage.id}", "stage", source) for source in stage.inputs.values()]
            for field, kind in (("data", "data set"), ("model", "model"), ("reward", "reward")):
                if hasattr(stage.op, field):
                    used.append((f"stage {stage.id}", kind, getattr(stage.op, field)))
        for model in self.models:
            if isinstance(model.source, FrozenModel | ValueModel):
                used.append((f"model {model.name}", "model", model.source.of))
        for reward in self.rewards:
            if isinstance(reward.source, DatasetScorer):
                used.append((f"reward {reward.name}", "data set", reward.source.data))
        for program in self.programs:
            used.append(("a program", "pool", program.pool))
            for instruction in (*program.step, *(i for e in program.evaluations for i in e.instructions)):
                if not isinstance(instruction, SaveCheckpoint | MoveObject):
                    kind = "model" if isinstance(instruction, PublishWeights | ReshardWeights) else "stage"
                    used.append((f"instruction {instruction.id}", kind, getattr(instruction, kind)))
        for channel in self.channels:
            used.append(("a channel", "model", channel.model))
            used += [("a channel", "stage", stage) for stage in (channel.source, *channel.readers)]
        broken = [f"{who} names the unknown {kind} {name}" for who, kind, name in used if name not in names[kind]]
        return broken if self.sources else ["it names no source", *broken]
