"""A SCHEDULED flow to a plan: slots become instruction lists, edges become inputs and channels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Literal, TypeVar

from rlflow.diagnostics import Span
from rlflow.ir import decisions
from rlflow.ir.decisions import Decision, QueueSpec, Stale
from rlflow.ir.flow import STEP, Edge, EdgeKind, Flow, Node, Stage, reads_model
from rlflow.ir.ops import FrozenModel, Generate, Join, Score, Take, Train, ValueModel
from rlflow.ir.updates import updates_of
from rlflow.plan import (
    COLLECTIVE_TIMEOUT_S,
    Because,
    Channel,
    DataDecl,
    EnvironmentDecl,
    Evaluation,
    Instruction,
    Layout,
    ModelDecl,
    MoveObject,
    Plan,
    Pool,
    Program,
    PublishWeights,
    PutRows,
    Queue,
    RankPlace,
    Reason,
    ReshardWeights,
    RewardDecl,
    RunStage,
    SaveCheckpoint,
    Source,
    StaleReader,
    Stop,
    TakeRows,
    WaitStage,
)
from rlflow.plan import Stage as PlanStage
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
from rlflow.values import dataclass

PartT = TypeVar("PartT", bound=PlanPart)


@dataclass(frozen=True)
class Provenance:
    """Where a plan comes from."""

    rlflow_version: str
    cluster: str
    sources: tuple[Source, ...]
    overrides: tuple[str, ...]
    pipeline: tuple[str, ...]
    pins: tuple[Span, ...] = ()
    """The lines of the schedule."""
    profile: Source | None = None


def freeze(flow: Flow, provenance: Provenance) -> Plan:
    """The plan of a scheduled flow."""
    assert flow.stage is Stage.SCHEDULED
    freezer = _Freezer(flow)
    return Plan(
        rlflow_version=provenance.rlflow_version,
        flow=flow.name,
        cluster=provenance.cluster,
        sources=provenance.sources,
        overrides=provenance.overrides,
        profile=provenance.profile,
        pipeline=",".join(provenance.pipeline),
        seed=flow.seed,
        stop=Stop(steps=flow.stop_steps, epochs=flow.stop_epochs),
        data=tuple(DataDecl(name=d.name, source=d.source, span=span_ref(d.span)) for d in flow.data.values()),
        models=tuple(
            ModelDecl(name=m.name, source=m.source, trainable=m.trainable, span=span_ref(m.span))
            for m in flow.models.values()
        ),
        rewards=tuple(RewardDecl(name=r.name, source=r.source, span=span_ref(r.span)) for r in flow.rewards.values()),
        environments=tuple(
            EnvironmentDecl(name=e.name, source=e.source, span=span_ref(e.span)) for e in flow.environments.values()
        ),
        pools=tuple(freezer.pools()),
        stages=tuple(freezer.stage(node) for node in flow.nodes.values()),
        programs=tuple(freezer.programs()),
        channels=tuple(freezer.channels()),
        queues=tuple(_repeated(Queue, found) for found in flow.decided(QueueSpec)),
        reshards=tuple(_repeated(Reshard, found) for found in flow.decided(decisions.Reshard)),
        memory=tuple(_repeated(PoolMemory, found) for found in flow.decided(decisions.Memory)),
        estimates=tuple(_repeated(StageEstimate, found) for found in flow.decided(decisions.Estimate)),
        cadence=next((_repeated(Cadence, found) for found in flow.decided(decisions.Cadence)), None),
        collective_timeout_s=collective_timeout_s(flow),
        pinned=tuple(Pinned(what=" ".join(span.text.split()), span=span_ref(span)) for span in provenance.pins),
        choices=tuple(_repeated(Choice, found) for found in flow.decided(decisions.Choice)),
        search=next((_repeated(Search, found) for found in flow.decided(decisions.SearchSummary)), None),
    )


def span_ref(span: Span | None) -> SpanRef:
    """A span as it stands in a plan; a flow parsed from its text form has none, which gives line 0."""
    if span is None:
        return SpanRef(file="", line=0, column=0, end_line=0, end_column=0)
    end_line, end_column = span.end_position
    return SpanRef(file=span.file.name, line=span.line, column=span.column, end_line=end_line, end_column=end_column)


def collective_timeout_s(flow: Flow) -> int:
    """Twice the longest stage or reshard, in whole seconds, and no less than the default: while one rank computes, the
    others may already wait for it."""
    times = [estimate.us for estimate in flow.decided(decisions.Estimate)]
    longest = max([*times, *(reshard.us for reshard in flow.decided(decisions.Reshard))], default=0)
    return max(COLLECTIVE_TIMEOUT_S, -(-2 * longest // 1_000_000))


def _because(node: Node) -> Because:
    if node.inserted_by:
        reason: Reason = "several-pools" if isinstance(node.op, Generate | Join) else "old-logprobs"
        return Because(reason=reason, span=span_ref(node.span), inserted_by=node.inserted_by)
    return Because(reason="written", span=span_ref(node.span))


def _repeated(part: type[PartT], decision: Decision) -> PartT:
    """The plan's part of a decision: the fields that the part has, by their names, with what is inside of them."""
    values = {name: getattr(decision, name) for name in part.model_fields}
    if "span" in values:
        values["span"] = span_ref(decision.span)
    return part.model_validate(values, from_attributes=True)


class _Freezer:
    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._inputs: dict[str, dict[str, str]] = {node_id: {} for node_id in flow.nodes}
        self._readers: dict[str, list[Node]] = {}
        self._kv_copies = {found.stage: found.copies for found in flow.decided(decisions.KvCopies)}
        for edge in flow.edges:
            if edge.kind is EdgeKind.DATA:
                self._inputs[edge.dst][edge.port] = edge.src
                self._readers.setdefault(edge.src, []).append(flow.nodes[edge.dst])

    def pools(self) -> Iterable[Pool]:
        devices: dict[str, int] = {}
        for pool in self._flow.pools.values():
            used = {} if pool.device == "functions" else devices  # pools do not share devices, workers have none
            ranks = []
            for rank, host in enumerate(pool.host_of_rank):
                ranks.append(RankPlace(rank=rank, host=host, index=used.get(host, 0)))
                used[host] = used.get(host, 0) + 1
            yield Pool(name=pool.name, device=pool.device, ranks=tuple(ranks))  # type: ignore[arg-type]

    def stage(self, node: Node) -> PlanStage:
        assert node.placement is not None
        layout = node.placement.layout
        return PlanStage(
            id=node.id,
            op=node.op,
            phase=node.phase,
            pool=node.placement.pool,
            layout=None if layout is None else Layout(**asdict(layout)),
            kv_copies=self._kv_copies.get(node.id, 1),
            inputs=dict(sorted(self._inputs[node.id].items())),
            output=str(node.type),
            because=_because(node),
        )

    def home(self, node: Node) -> str:
        """The pool whose instruction list runs the stage. A Python stage is called by the pool whose rows it scores."""
        assert node.placement is not None
        if isinstance(node.op, Score):
            return self.home(self._flow.nodes[self._inputs[node.id]["samples"]])
        return node.placement.pool

    def _moves(self, pool: str, before: str) -> Iterable[MoveObject]:
        """What leaves and comes back in front of a stage, or of a `reshard` or `publish` of a model."""
        for swap in self._flow.decided(decisions.Swap):
            if swap.pool == pool and swap.before == before:
                yield MoveObject(
                    kind="onload" if swap.action == "rebuild" else swap.action,
                    id=f"{swap.action}:{swap.object}",
                    object=swap.object,
                    bytes=swap.bytes,
                    from_host=swap.action in ("offload", "onload", "save"),
                    us=swap.us,
                    exposed_us=swap.exposed_us,
                    because=Because(reason="memory", span=span_ref(swap.span), inserted_by="insert-swaps"),
                )

    def _readers_elsewhere(self, node: Node) -> dict[str, list[Node]]:
        """Other pools that read a stage's result, each with its reading stages."""
        out: dict[str, list[Node]] = {}
        for reader in self._readers.get(node.id, ()):
            if self.home(reader) != self.home(node):
                out.setdefault(self.home(reader), []).append(reader)
        return out

    def programs(self) -> Iterable[Program]:
        flow = self._flow
        savers = {self.home(node) for node in flow.nodes.values() if isinstance(node.op, Train)}
        for pool in flow.pools.values():
            if pool.device == "functions":
                continue  # called by the pools that use it
            step = list(self._instructions(STEP, pool.name))
            if pool.name in savers:
                step.append(self._checkpoint())
            evaluations = (
                Evaluation(name=e.name, every=e.every, instructions=tuple(self._instructions(e.name, pool.name)))
                for e in flow.evaluations
            )
            yield Program(pool=pool.name, step=tuple(step), evaluations=tuple(e for e in evaluations if e.instructions))

    def _checkpoint(self) -> SaveCheckpoint:
        flow = self._flow
        written = flow.save_every > 0
        because = Because(
            reason="written" if written else "keep-progress",
            span=span_ref(flow.save_span or flow.span),
            inserted_by="" if written else "freeze",
        )
        return SaveCheckpoint(id="checkpoint", every=flow.save_every, because=because)

    def _instructions(self, phase: str, pool: str) -> Iterable[Instruction]:
        """The pool's part of a phase, in slot order, with what crosses pools put, taken and resharded."""
        flow = self._flow
        nodes = sorted(flow.phase_nodes(phase), key=lambda n: n.slot if n.slot is not None else 0)
        pending: dict[str, Node] = {}
        taken: set[str] = set()
        fresh: set[str] = set()
        for node in nodes:
            if self.home(node) != pool:
                continue
            for source_id in self._inputs[node.id].values():
                source = flow.nodes[source_id]
                if source_id in pending:
                    yield self._wait(pending.pop(source_id), node)
                    yield from self._puts(source)
                elif self.home(source) != pool and source_id not in taken:
                    taken.add(source_id)
                    yield TakeRows(
                        id=f"take:{source_id}",
                        stage=source_id,
                        queue=f"{source_id}->{pool}",
                        because=self._other_pool(node),
                    )
            model = reads_model(node.op)
            if model is not None and self._receives(node):
                key, readers = self._reshard_of(node, model)
                if key not in fresh:
                    fresh.add(key)
                    if phase == STEP:
                        yield from self._moves(pool, f"reshard {key}")
                    prefix = "" if phase == STEP else f"{phase}."
                    yield ReshardWeights(
                        id=f"reshard:{prefix}{key}", model=model, readers=readers, because=self._other_layout(node)
                    )
            if isinstance(node.op, Take):
                yield TakeRows(id=f"take:{node.id}", stage=node.id, because=_because(node))
                yield from self._puts(node)
                continue
            if phase == STEP:
                yield from self._moves(pool, node.id)
            yield RunStage(id=f"run:{node.id}", stage=node.id, because=_because(node))
            if isinstance(node.op, Score):
                pending[node.id] = node
                continue
            yield from self._puts(node)
            if isinstance(node.op, Train):
                yield from self._moves(pool, f"publish {node.op.model}")
                yield PublishWeights(
                    id=f"publish:{node.op.model}",
                    model=node.op.model,
                    because=Because(
                        reason="weights-changed", span=span_ref(node.span), inserted_by="insert-weight-edges"
                    ),
                )
        for node in pending.values():
            yield self._wait(node, node)
            yield from self._puts(node)

    def _reshard_of(self, node: Node, model: str) -> tuple[str, tuple[str, ...]]:
        """The reshard that brings a stage's weights, by id, and its readers; by model where it has no numbers."""
        for found in self._flow.decided(decisions.Reshard):
            if node.id in found.readers:
                return found.id, found.readers
        assert node.placement is not None
        assert node.placement.layout is not None
        place, layout = node.placement.pool, node.placement.layout.weights
        readers = [
            other.id
            for other in self._flow.nodes.values()
            if reads_model(other.op) == model and other.placement is not None and other.placement.pool == place
            if other.placement.layout is not None and other.placement.layout.weights == layout and self._receives(other)
        ]
        return model, tuple(readers)

    def _receives(self, node: Node) -> bool:
        """Whether the weights that a stage reads are trained on another pool or in another layout."""
        for edge in self._flow.edges:
            if edge.kind is EdgeKind.WEIGHTS and edge.dst == node.id:
                return self._moves_weights(self._flow.nodes[edge.src], node)
        return False

    def _moves_weights(self, trainer: Node, reader: Node) -> bool:
        """Whether the reader's devices hold other parts of the weights than those that train."""
        here, there = trainer.placement, reader.placement
        assert here is not None
        assert there is not None
        if here.pool != there.pool or here.layout is None or there.layout is None:
            return here.pool != there.pool
        return here.layout.weights != there.layout.weights

    def _puts(self, node: Node) -> Iterable[Instruction]:
        for pool, readers in self._readers_elsewhere(node).items():
            yield PutRows(
                id=f"put:{node.id}->{pool}",
                stage=node.id,
                queue=f"{node.id}->{pool}",
                because=self._other_pool(readers[0]),
            )

    def _other_layout(self, reader: Node) -> Because:
        return Because(reason="other-layout", span=span_ref(reader.span), inserted_by="insert-reshards")

    def _other_pool(self, reader: Node) -> Because:
        return Because(reason="other-pool", span=span_ref(reader.span), inserted_by="place")

    def _wait(self, node: Node, reader: Node) -> WaitStage:
        return WaitStage(
            id=f"wait:{node.id}",
            stage=node.id,
            because=Because(reason="asynchronous-call", span=span_ref(reader.span), inserted_by="schedule"),
        )

    def _transport(self, trainer: Node, edges: list[Edge]) -> Literal["alias", "cast", "merge", "reshard"]:
        if any(self._moves_weights(trainer, self._flow.nodes[edge.dst]) for edge in edges):
            return "reshard"
        assert isinstance(trainer.op, Train)
        source = self._flow.models[trainer.op.model].source
        if getattr(source, "lora", None) is not None:
            return "merge"
        while isinstance(source, FrozenModel | ValueModel):
            source = self._flow.models[source.of].source
        return "cast" if source.compute == "bf16" else "alias"

    def channels(self) -> Iterable[Channel]:
        flow = self._flow
        for node in flow.nodes.values():
            if not isinstance(node.op, Train):
                continue
            edges = [e for e in flow.edges if e.kind is EdgeKind.WEIGHTS and e.src == node.id]
            assert all(flow.owner_of(reads_model(flow.nodes[e.dst].op)) == node.op.model for e in edges)
            yield Channel(
                model=node.op.model,
                source=node.id,
                readers=tuple(e.dst for e in edges),
                max_staleness=max((e.tokens - 1 for e in edges), default=0),
                updates=updates_of(flow, node),
                stale=tuple(_repeated(StaleReader, d) for d in flow.decided(Stale) if d.model == node.op.model),
                transport=self._transport(node, edges),
            )
