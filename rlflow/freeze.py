"""A SCHEDULED flow to a plan: slots become instruction lists, edges become inputs and channels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlflow.diagnostics import Span
from rlflow.ir.flow import STEP, EdgeKind, Flow, Node, Stage, reads_model
from rlflow.ir.ops import FrozenModel, Score, Take, Train, ValueModel
from rlflow.plan import (
    Because,
    Channel,
    DataDecl,
    EnvironmentDecl,
    Evaluation,
    Instruction,
    Layout,
    ModelDecl,
    Plan,
    Pool,
    Program,
    PublishWeights,
    RankPlace,
    Reason,
    RewardDecl,
    RunStage,
    SaveCheckpoint,
    Source,
    SpanRef,
    Stop,
    TakeRows,
    WaitStage,
)
from rlflow.plan import Stage as PlanStage


@dataclass(frozen=True)
class Provenance:
    """Where a plan comes from."""

    rlflow_version: str
    cluster: str
    sources: tuple[Source, ...]
    overrides: tuple[str, ...]
    pipeline: tuple[str, ...]


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
    )


def span_ref(span: Span | None) -> SpanRef:
    """A span as it stands in a plan; a flow parsed from its text form has none, which gives line 0."""
    if span is None:
        return SpanRef(file="", line=0, column=0, end_line=0, end_column=0)
    end_line, end_column = span.end_position
    return SpanRef(file=span.file.name, line=span.line, column=span.column, end_line=end_line, end_column=end_column)


def _because(node: Node) -> Because:
    if node.inserted_by:
        return Because(reason="old-logprobs", span=span_ref(node.span), inserted_by=node.inserted_by)
    return Because(reason="written", span=span_ref(node.span))


class _Freezer:
    def __init__(self, flow: Flow) -> None:
        self._flow = flow

    def pools(self) -> Iterable[Pool]:
        for pool in self._flow.pools.values():
            used: dict[str, int] = {}
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
            layout=None if layout is None else Layout(dp=layout.dp, tp=layout.tp, pp=layout.pp),
            inputs=dict(sorted(self._flow.inputs(node.id).items())),
            output=str(node.type),
            because=_because(node),
        )

    def programs(self) -> Iterable[Program]:
        flow = self._flow
        for pool in flow.pools.values():
            if pool.device == "functions":
                continue  # called by the pools that use it
            step = list(self._instructions(STEP))
            save_span = span_ref(flow.save_span or flow.span)
            reason: Reason = "written" if flow.save_every else "keep-progress"
            inserted_by = "" if flow.save_every else "freeze"
            step.append(
                SaveCheckpoint(
                    id="checkpoint",
                    every=flow.save_every,
                    because=Because(reason=reason, span=save_span, inserted_by=inserted_by),
                )
            )
            evaluations = tuple(
                Evaluation(name=e.name, every=e.every, instructions=tuple(self._instructions(e.name)))
                for e in flow.evaluations
            )
            yield Program(pool=pool.name, step=tuple(step), evaluations=evaluations)

    def _instructions(self, phase: str) -> Iterable[Instruction]:
        flow = self._flow
        nodes = sorted(flow.phase_nodes(phase), key=lambda n: n.slot if n.slot is not None else 0)
        pending: dict[str, Node] = {}
        for node in nodes:
            for source in flow.inputs(node.id).values():
                if source in pending:
                    yield self._wait(pending.pop(source), node)
            if isinstance(node.op, Take):
                yield TakeRows(id=f"take:{node.id}", stage=node.id, because=_because(node))
                continue
            yield RunStage(id=f"run:{node.id}", stage=node.id, because=_because(node))
            if isinstance(node.op, Score):
                pending[node.id] = node
            if isinstance(node.op, Train):
                yield PublishWeights(
                    id=f"publish:{node.op.model}",
                    model=node.op.model,
                    because=Because(
                        reason="weights-changed", span=span_ref(node.span), inserted_by="insert-weight-edges"
                    ),
                )
        for node in pending.values():
            yield self._wait(node, node)

    def _wait(self, node: Node, reader: Node) -> WaitStage:
        return WaitStage(
            id=f"wait:{node.id}",
            stage=node.id,
            because=Because(reason="asynchronous-call", span=span_ref(reader.span), inserted_by="schedule"),
        )

    def channels(self) -> Iterable[Channel]:
        flow = self._flow
        for node in flow.nodes.values():
            if not isinstance(node.op, Train):
                continue
            edges = [e for e in flow.edges if e.kind is EdgeKind.WEIGHTS and e.src == node.id]
            source = flow.models[node.op.model].source
            while isinstance(source, FrozenModel | ValueModel):
                source = flow.models[source.of].source
            compute = source.compute
            assert all(reads_model(flow.nodes[e.dst].op) == node.op.model for e in edges)
            yield Channel(
                model=node.op.model,
                source=node.id,
                readers=tuple(e.dst for e in edges),
                max_staleness=max((e.tokens - 1 for e in edges), default=0),
                transport="cast" if compute == "bf16" else "alias",
            )
