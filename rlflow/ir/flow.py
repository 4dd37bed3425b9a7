"""The intermediate form: an immutable flow of stages and edges, refined by passes from LOGICAL to SCHEDULED."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from enum import IntEnum, StrEnum
from typing import Literal, TypeVar

from rlflow.diagnostics import Span
from rlflow.ir.decisions import Decision
from rlflow.ir.ops import Correction, DataSource, EnvironmentSource, ModelSource, Op, RewardSource, ValueModel
from rlflow.ir.order import phase_orders
from rlflow.ir.typesystem import RowsType, WeightsType
from rlflow.values import dataclass

D = TypeVar("D", bound=Decision)

STEP = "step"
"""The phase of the training step; every other phase is an evaluation's name."""


class Stage(IntEnum):
    """How far a flow has been refined."""

    LOGICAL = 1
    PLACED = 2
    PHYSICAL = 3
    SCHEDULED = 4


class EdgeKind(StrEnum):
    DATA = "data"
    WEIGHTS = "weights"
    ORDER = "order"


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the mesh axes of a model stage, and what else decides which device holds which part.

    A pool has dp x cp x tp x pp devices. The experts of a mixture-of-experts model have a mesh of their own over the
    devices of one pipeline stage: ep x etp x (what is left), so they take no further devices.
    """

    dp: int = 1
    """Data parallel replicas."""
    tp: int = 1
    """Tensor parallel."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert parallel: the experts of a layer are dealt out over so many groups."""
    cp: int = 1
    """Context parallel: the tokens of a sequence are split."""
    etp: int = 1
    """Tensor parallel size of one expert; 1 for a dense model."""
    vp: int = 1
    """Virtual pipeline stages of a rank (interleaved schedule)."""
    split: tuple[int, ...] = ()
    """Layers of every pipeline stage, pp x vp numbers in layer order; empty = equal."""
    sp: bool = False
    """Sequence parallelism: norms and activations between tensor-parallel parts are split over tp."""
    zero: int = 0
    """What of a trained model is sharded over dp x cp: 1 the optimizer state, 2 the gradients too, 3 the weights too
    (FSDP)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass of training computes again: nothing, the attention, every layer."""

    @property
    def size(self) -> int:
        """Devices."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def model_parallel(self) -> int:
        """Devices of one replica, which all need the same rows."""
        return self.cp * self.tp * self.pp

    @property
    def weights(self) -> Layout:
        """The part that decides which device holds which weights: layouts that agree in it need no reshard."""
        return replace(self, sp=False, recompute="none", zero=3 if self.zero == 3 else 0)

    @property
    def expert_replicas(self) -> int:
        """Copies of every expert within its pipeline stage."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    def layers_of(self, stage: int, layers: int) -> tuple[int, ...]:
        """Layer indices of pipeline stage `stage` of a model of `layers` layers, in order.

        With virtual stages chunk c of rank s is part c x pp + s of the split.
        """
        parts = self.split or (layers // (self.pp * self.vp),) * (self.pp * self.vp)
        starts = [sum(parts[:i]) for i in range(len(parts))]
        mine = range(stage, self.pp * self.vp, self.pp)
        return tuple(layer for part in mine for layer in range(starts[part], starts[part] + parts[part]))


@dataclass(frozen=True, slots=True)
class Placement:
    """A pool, and the sharding over it (None for stages without a model)."""

    pool: str
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One stage. An inserted node keeps the span of what caused it."""

    id: str
    op: Op
    type: RowsType | WeightsType
    span: Span | None = None
    phase: str = STEP
    inserted_by: str = ""
    placement: Placement | None = None
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Edge:
    """`tokens` are the initial tokens: on a weights edge 1 + the permitted staleness in steps, on others 0."""

    src: str
    dst: str
    kind: EdgeKind
    port: str = ""
    tokens: int = 0
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Data:
    name: str
    source: DataSource
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    source: ModelSource
    trainable: bool
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Reward:
    name: str
    source: RewardSource
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    name: str
    source: EnvironmentSource
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`every` in steps, 0 = only before the first and after the last."""

    name: str
    every: int
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """`device` is a torch device type, or `functions` for CPU workers of Python stages."""

    name: str
    device: str
    host_of_rank: tuple[str, ...]
    """The host of every rank, in rank order."""
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Flow:
    """A value: a pass returns a new one. Maps keep the order in which the user declared things."""

    name: str
    stage: Stage
    data: Mapping[str, Data]
    models: Mapping[str, Model]
    rewards: Mapping[str, Reward]
    nodes: Mapping[str, Node]
    edges: tuple[Edge, ...]
    evaluations: tuple[Evaluation, ...] = ()
    allowed_staleness: Mapping[str, int] = field(default_factory=dict)
    """Model to the bound in steps that the algorithm permits."""
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    """Model to how its loss accounts for older samples, where the algorithm says so."""
    stop_steps: int | None = None
    stop_epochs: int | None = 1
    save_every: int = 0
    save_span: Span | None = None
    seed: int = 0
    pools: Mapping[str, PoolSpec] = field(default_factory=dict)
    span: Span | None = None
    environments: Mapping[str, Environment] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    """What passes decided beside placements and edges."""

    def decided(self, kind: type[D]) -> list[D]:
        """The decisions of one kind, in order."""
        return [decision for decision in self.decisions if isinstance(decision, kind)]

    def inputs(self, node_id: str) -> dict[str, str]:
        """Port to producer, over data edges."""
        return {e.port: e.src for e in self.edges if e.dst == node_id and e.kind is EdgeKind.DATA}

    def phase_nodes(self, phase: str) -> Iterator[Node]:
        return (node for node in self.nodes.values() if node.phase == phase)

    def with_nodes(self, *nodes: Node) -> Flow:
        """The flow with these nodes replaced (same id) or appended."""
        merged = dict(self.nodes)
        for node in nodes:
            merged[node.id] = node
        return replace(self, nodes=merged)

    def topological_order(self, phase: str) -> list[str]:
        """Node ids of a phase along data and order edges without tokens; ties keep the order of declaration.

        Raises ValueError with the ids on a cycle.
        """
        orders, stuck = phase_orders(self)
        if phase in stuck:
            raise ValueError("cycle through " + ", ".join(stuck[phase]))
        return orders.get(phase, [])

    def owner_of(self, model: str | None) -> str | None:
        """The model whose parameters this one uses: itself, or the one that a shared value head sits on."""
        declared = None if model is None else self.models.get(model)
        shared = declared is not None and isinstance(declared.source, ValueModel) and declared.source.shared
        return declared.source.of if shared else model  # type: ignore[union-attr]


def reads_model(op: Op) -> str | None:
    """The model whose weights a stage reads, or None."""
    return getattr(op, "model", None)
