"""The intermediate form: an immutable flow of stages and edges, refined by passes from LOGICAL to SCHEDULED."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

from rlflow.diagnostics import Span
from rlflow.ir.ops import DataSource, EnvironmentSource, ModelSource, Op, RewardSource
from rlflow.ir.typesystem import RowsType, WeightsType

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
    """Sizes of the mesh axes of a model stage."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    """Expert parallelism lies inside dp x tp: it takes no further devices."""

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp


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
    stop_steps: int | None = None
    stop_epochs: int | None = 1
    save_every: int = 0
    save_span: Span | None = None
    seed: int = 0
    pools: Mapping[str, PoolSpec] = field(default_factory=dict)
    span: Span | None = None
    environments: Mapping[str, Environment] = field(default_factory=dict)

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
        members = [n.id for n in self.phase_nodes(phase)]
        waiting = {node_id: 0 for node_id in members}
        readers: dict[str, list[str]] = {node_id: [] for node_id in members}
        for edge in self.edges:
            if edge.src in waiting and edge.dst in waiting and edge.tokens == 0 and edge.kind is not EdgeKind.WEIGHTS:
                waiting[edge.dst] += 1
                readers[edge.src].append(edge.dst)
        position = {node_id: i for i, node_id in enumerate(members)}
        ready = [node_id for node_id in members if waiting[node_id] == 0]
        order: list[str] = []
        while ready:
            ready.sort(key=position.__getitem__)
            node_id = ready.pop(0)
            order.append(node_id)
            for reader in readers[node_id]:
                waiting[reader] -= 1
                if waiting[reader] == 0:
                    ready.append(reader)
        if len(order) < len(members):
            raise ValueError("cycle through " + ", ".join(sorted(set(members) - set(order))))
        return order


def reads_model(op: Op) -> str | None:
    """The model whose weights a stage reads, or None."""
    return getattr(op, "model", None)
