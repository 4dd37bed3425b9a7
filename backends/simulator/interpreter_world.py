"""What the pools of a plan share while it is simulated: queues, weights, samples, links, workers, and the record."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlflow.backends.simulator.clock import Clock, Process, Signal, Time
from rlflow.backends.simulator.interpreter_edges import Edge
from rlflow.backends.simulator.interpreter_queues import BatchQueue
from rlflow.backends.simulator.interpreter_weights import WeightBook
from rlflow.backends.simulator.resources import PoolLinks, Workers
from rlflow.backends.simulator.run_calls import Calls
from rlflow.backends.simulator.run_filters import Filter
from rlflow.ir.flow import STEP, reads_model
from rlflow.ir.ops import Score
from rlflow.plan import Instruction, Plan, PublishWeights, RunStage, Stage, TakeRows, WaitStage
from rlflow.stage_times import Durations


class Server(Protocol):
    """Runs a generate stage."""

    def run(self, step: int) -> Process:
        """The stage's instruction: returns when the step's samples are there as far as the plan asks."""
        ...

    def hold(self) -> None:
        """The devices are needed for something else."""
        ...

    def release(self) -> None: ...

    @property
    def free(self) -> float:
        """The share of the devices that other stages may use while the last samples of a batch are generated; 1 where
        none are."""
        ...

    @property
    def changed(self) -> Signal:
        """Fired when samples are finished."""
        ...

    @property
    def busy(self) -> bool:
        """Whether samples are being generated beside the pool's list."""
        ...

    def share(self, stages: int) -> None:
        """So many stages generate on the devices at once."""
        ...


@dataclass(slots=True)
class Record:
    """What happened. Times in microseconds."""

    events: list[dict[str, Any]] = field(default_factory=list)
    """As `rlflow.backends.visualizers.trace` reads them."""
    work: dict[str, list[tuple[Time, Time, float]]] = field(default_factory=lambda: defaultdict(list))
    """Pool to (start, end, share of its devices) of its stages."""
    ends: dict[int, Time] = field(default_factory=dict)
    """Step to its end, on the last pool that trains."""


@dataclass(slots=True, eq=False)
class World:
    """One simulation of a plan."""

    plan: Plan
    clock: Clock
    durations: Durations
    phases: tuple[str, ...]
    """`step`, and the evaluations that are simulated."""
    edges: dict[str, Edge]
    servers: dict[str, Server]
    weights: WeightBook
    filters: Mapping[str, Filter] = field(default_factory=dict)
    """Stages that drop groups and sample further prompts, where it is said how many they keep."""
    calls: Mapping[str, Calls] = field(default_factory=dict)
    """Reward stages whose calls fail now and then."""
    record: Record = field(default_factory=Record)
    queues: dict[str, BatchQueue] = field(init=False)
    links: dict[str, PoolLinks] = field(init=False)
    workers: dict[str, Workers] = field(init=False)
    _stages: dict[str, Stage] = field(init=False)
    _readers: dict[str, set[str]] = field(init=False)
    _trainers: set[str] = field(init=False)
    """Pools that publish weights; all that run something where none does."""
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        plan, clock = self.plan, self.clock
        self.queues = {queue.id: BatchQueue(queue, clock) for queue in plan.queues}
        self.links = {pool.name: PoolLinks.of(pool.name, clock) for pool in plan.pools if pool.device != "functions"}
        self.workers = {pool.name: Workers(pool.name, clock) for pool in plan.pools}
        self._stages = {stage.id: stage for stage in plan.stages}
        self._readers = defaultdict(set)
        for stage in plan.stages:
            for source in stage.inputs.values():
                self._readers[source].add(stage.id)
        publishing = {p.pool for p in plan.programs if any(isinstance(i, PublishWeights) for i in p.step)}
        self._trainers = publishing or {program.pool for program in plan.programs}

    # --- what the plan says ------------------------------------------------------------------------------------------

    def stage(self, id: str) -> Stage:
        return self._stages[id]

    def queues_of(self, stage: str) -> list[BatchQueue]:
        """Queues that carry the stage's result."""
        return [queue for queue in self.queues.values() if queue.spec.stage == stage]

    def window(self, stage: str) -> Time:
        """Microseconds of a stage beside which copies run, by the plan; Python stages are not waited for."""
        return self.durations.us.get(stage, 0) if reads_model(self._stages[stage].op) is not None else 0

    def last_readers(self, instructions: Sequence[Instruction]) -> dict[int, list[str]]:
        """Number of an instruction to the queues whose batch is read for the last time by it."""
        found: dict[int, list[str]] = {}
        for number, take in enumerate(instructions):
            if isinstance(take, TakeRows) and take.queue:
                readers = self._readers[take.stage]
                last = max(
                    (
                        n
                        for n, i in enumerate(instructions)
                        if isinstance(i, RunStage | WaitStage) and i.stage in readers
                    ),
                    default=number,
                )
                found.setdefault(last, []).append(take.queue)
        return found

    def only_scored(self, stage: str) -> bool:
        """Whether nothing but Python functions reads a stage's rows. These take rows as they come, so that they ask for
        no batch."""
        return all(isinstance(self._stages[reader].op, Score) for reader in self._readers[stage])

    def edge(self, stage: str, phase: str) -> Edge | None:
        """The samples of a generate stage of the step."""
        return self.edges.get(stage) if phase == STEP else None

    def share(self, stage: str, phase: str, batch: int) -> float:
        """Of a generate stage's batch, what may be read now; at least what the stage has seen of it."""
        edge = self.edge(stage, phase)
        return 1.0 if edge is None else edge.share(batch) or 0.0

    def arrived(self, stage: str, phase: str, batch: int) -> float:
        """Of a generate stage's batch, what is finished, be it that it may be read or not."""
        edge = self.edge(stage, phase)
        return 1.0 if edge is None else edge.arrived(batch)

    def size(self, stage: str, phase: str, batch: int) -> float:
        """Samples of a generate stage's batch that may be read now, over those of a full batch."""
        edge = self.edge(stage, phase)
        return 1.0 if edge is None else edge.size(batch)

    # --- what happens ------------------------------------------------------------------------------------------------

    def trained(self, model: str, step: int) -> None:
        for edge in self.edges.values():
            if edge.trained_elsewhere and getattr(edge.stage.op, "model", None) == model:
                edge.trained(step)

    def hold(self, pool: str) -> None:
        for stage, server in self.servers.items():
            if self._stages[stage].pool == pool:
                server.hold()

    def release(self, pool: str) -> None:
        for stage, server in self.servers.items():
            if self._stages[stage].pool == pool:
                server.release()

    def tail(self, pool: str) -> Server | None:
        """What still generates the last samples of a batch, on a part of the pool's devices."""
        servers = (server for stage, server in self.servers.items() if self._stages[stage].pool == pool)
        return next((server for server in servers if server.free < 1), None)

    def shared(self, pool: str) -> None:
        """A generate stage of the pool has begun or ended: the devices are shared by those that have samples."""
        servers = [server for stage, server in self.servers.items() if self._stages[stage].pool == pool]
        stages = max(1, sum(server.busy for server in servers))
        for server in servers:
            server.share(stages)

    def evaluated(self, pool: str, name: str) -> int:
        """How often the pool has run this evaluation before."""
        self._counts[pool, name] += 1
        return self._counts[pool, name] - 1

    # --- the record --------------------------------------------------------------------------------------------------

    def worked(self, pool: str, start: Time, share: float) -> None:
        """Devices were busy from `start` until now."""
        if self.clock.now > start:
            self.record.work[pool].append((start, self.clock.now, share))

    def ended(self, pool: str, step: int) -> None:
        if pool in self._trainers:
            self.record.ends[step] = max(self.record.ends.get(step, 0), self.clock.now)

    def note(self, pool: str, instruction: Instruction, step: int, started: Time) -> None:
        stage, model = getattr(instruction, "stage", ""), getattr(instruction, "model", None)
        self._event(pool, instruction.id, stage, instruction.kind, step, started, model)

    def note_call(self, stage: Stage, step: int, started: Time) -> None:
        self._event(stage.pool, f"call:{stage.id}", stage.id, "call", step, started, None)

    def _event(
        self, pool: str, instruction: str, stage: str, kind: str, step: int, started: Time, model: str | None
    ) -> None:
        edge = self.edges.get(stage)
        if stage:
            model = reads_model(self._stages[stage].op)
        known = model is not None and self.weights.channel(model) is not None
        version = self.weights.published.get(model or "", 0) if known else None
        if edge is not None and known:
            version = edge.loaded
        self.record.events.append(
            {
                "pool": pool,
                "rank": 0,
                "instruction": instruction,
                "stage": stage,
                "kind": kind,
                "step": step + 1,
                "start_us": float(started),
                "duration_us": float(self.clock.now - started),
                "version": version,
            }
        )
