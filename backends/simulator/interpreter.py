"""The interpreter: walks a pool's instruction lists in virtual time, one handler per kind. It decides nothing.

All ranks of a pool do the same at the same time, so a pool is one process. Python functions run beside it, on their
workers, from their `run` to their `wait`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from rlflow.backends.simulator.clock import Process, Signal, Time, Wait
from rlflow.backends.simulator.interpreter_moves import starts_of
from rlflow.backends.simulator.interpreter_world import World
from rlflow.backends.simulator.resources import transfer
from rlflow.backends.simulator.run_migration import begins_early
from rlflow.ir.flow import STEP, reads_model
from rlflow.ir.ops import Generate, Join, Score, Train
from rlflow.plan import (
    Instruction,
    MoveObject,
    Program,
    PublishWeights,
    PutRows,
    ReshardWeights,
    RunStage,
    SaveCheckpoint,
    Stage,
    TakeRows,
    WaitStage,
)
from rlflow.stage_times import CHECKPOINT

_Timed = Generator[Time | Wait, None, Time]
"""A process that returns a time."""
_EARLY_PART = 1 / 64
"""Of a stage's work, between two looks at how many devices are free."""


class Lane:
    """One pool. `run` is its process: so many steps, with the evaluations between if they are wanted."""

    def __init__(self, world: World, program: Program) -> None:
        self._world = world
        self._program = program
        self._pool = program.pool
        self._done: set[tuple[str, int]] = set()
        """(Python stage, batch) whose result is there."""
        self._collected = Signal()
        self._copies: dict[tuple[str, int], Time] = {}
        """(instruction, batch) to the end of the copy that began ahead of it."""
        self._ahead = starts_of(program.step, world.window)
        self._there = {start.instruction.id for starts in self._ahead.values() for start in starts if start.steps}
        """Copies that would have begun before the first step."""
        self._batch = 0
        self._phase = STEP

    def run(self, steps: int, evaluations: bool) -> Process:
        world = self._world
        for step in range(steps):
            if evaluations:
                yield from self._evaluate(step, last=False)
            yield from self._list(self._program.step, STEP, step, step)
            world.ended(self._pool, step)
        if evaluations:
            yield from self._evaluate(steps, last=True)

    def _evaluate(self, step: int, *, last: bool) -> Process:
        for evaluation in self._program.evaluations:
            if step == 0 or last or (evaluation.every and step % evaluation.every == 0):
                count = self._world.evaluated(self._pool, evaluation.name)
                yield from self._list(evaluation.instructions, evaluation.name, step, count)

    def _list(self, instructions: Sequence[Instruction], phase: str, step: int, batch: int) -> Process:
        """One pass. `batch` numbers the batches of its queues."""
        self._batch, self._phase = batch, phase
        world = self._world
        last_reader = world.last_readers(instructions)
        ahead = self._ahead if phase == STEP else {}
        for number, instruction in enumerate(instructions):
            for move in ahead.get(number, ()):
                self._copy_ahead(move.instruction, step + move.steps)
            started = world.clock.now
            early = isinstance(instruction, RunStage) and begins_early(world.stage(instruction.stage))
            if not early:
                yield from self._rest()
            match instruction:
                case TakeRows():
                    yield from self._take(instruction, step)
                case PutRows():
                    world.queues[instruction.queue].fill(batch)
                case RunStage():
                    started = yield from self._run(world.stage(instruction.stage), step)
                case WaitStage():
                    while (instruction.stage, batch) not in self._done:
                        yield Wait(self._collected, f"the result of {instruction.stage}")
                    self._done.discard((instruction.stage, batch))
                case ReshardWeights():
                    started = yield from self._reshard(instruction, step)
                case PublishWeights():
                    world.weights.publish(instruction.model, step + 1)
                case MoveObject():
                    yield from self._move(instruction, step)
                case SaveCheckpoint():
                    if not (instruction.every and (step + 1) % instruction.every == 0):
                        continue
                    yield world.durations.of(CHECKPOINT, step)
            world.note(self._pool, instruction, step, started)
            for queue in last_reader.get(number, ()):
                world.queues[queue].release(batch)

    # --- rows --------------------------------------------------------------------------------------------------------

    def _take(self, instruction: TakeRows, step: int) -> Process:
        world = self._world
        if not instruction.queue:
            yield from self._reserve(instruction.stage)
            yield world.durations.of(instruction.stage, step)
            return
        yield from world.queues[instruction.queue].take(self._batch)
        edge = world.edge(instruction.stage, self._phase)
        if edge is not None:
            yield from self._share(instruction.stage, 0.0)

    def _reserve(self, stage: str) -> Process:
        for queue in self._world.queues_of(stage):
            yield from queue.reserve(self._batch)

    def _share(self, source: str, above: float) -> Process:
        """Sleeps until more than this share of the step's samples is there."""
        edge = self._world.edge(source, self._phase)
        assert edge is not None
        while (edge.share(self._batch) or 0.0) <= above:
            yield Wait(edge.changed, edge.missing(self._batch))

    def _whole(self, source: str) -> Process:
        """Sleeps until all samples of the step are there."""
        edge = self._world.edge(source, self._phase)
        assert edge is not None
        while (edge.share(self._batch) or 0.0) < 1:
            yield Wait(edge.changed, edge.missing(self._batch))

    # --- stages ------------------------------------------------------------------------------------------------------

    def _run(self, stage: Stage, step: int) -> _Timed:
        """Returns when the work itself began."""
        world = self._world
        if isinstance(stage.op, Score):
            world.clock.start(stage.id, self._call(stage, step, self._batch))
            return world.clock.now
        yield from self._reserve(stage.id)
        if isinstance(stage.op, Generate):
            started = world.clock.now
            server = world.servers.get(stage.id) if self._phase == STEP else None
            if server is not None:
                yield from server.run(step)
                if world.only_scored(stage.id):
                    yield from self._whole(stage.id)  # nobody else asks for the batch
            else:
                yield from self._work(stage, step, ())
            return started
        sources = [source for source in stage.inputs.values() if world.edge(source, self._phase) is not None]
        started = world.clock.now
        ahead = yield from self._early(stage, step, sources)
        for source in sources:
            yield from (self._whole(source) if isinstance(stage.op, Join) else self._share(source, 0.0))
        started = started if ahead else world.clock.now
        yield from self._work(stage, step, sources, ahead)
        if stage.id in world.filters and self._phase == STEP:
            for source in sources:
                yield from self._whole(source)
            while world.filters[stage.id].further(step):
                yield from self._again(world.filters[stage.id].above, step)
        if isinstance(stage.op, Train):
            world.trained(stage.op.model, step)
        return started

    def _rest(self) -> Process:
        """Sleeps until no samples of a batch are left that were moved together: what follows needs all devices."""
        while (server := self._world.tail(self._pool)) is not None:
            yield Wait(server.changed, "the last samples of a batch")

    def _early(self, stage: Stage, step: int, sources: Sequence[str]) -> Generator[Time | Wait, None, float]:
        """Works on finished groups, on the devices that the last samples leave free. Returns the share that is done."""
        world, done = self._world, 0.0
        total = world.durations.of(stage.id, step) if begins_early(stage) else 0
        while total and (server := world.tail(self._pool)) is not None:
            there = min((world.arrived(source, self._phase, self._batch) for source in sources), default=1.0)
            part, free = min(there - done, _EARLY_PART), server.free
            if part <= 0 or not free:
                yield Wait(server.changed, f"finished groups for {stage.id}")
                continue
            began = world.clock.now
            yield total * part / free
            world.worked(self._pool, began, free)
            done += part
        return done

    def _work(self, stage: Stage, step: int, sources: Sequence[str], done: float = 0.0) -> Process:
        """The stage's time, in proportion to the samples. Those that are still being generated come later; those that a
        trigger carries over to the next step are not of this one. `done` of it is done already."""
        world = self._world
        total = world.durations.of(stage.id, step)
        if not total:
            return
        on_devices = reads_model(stage.op) is not None
        while True:
            shares = [(world.share(source, self._phase, self._batch), source) for source in sources]
            share, slowest = min(shares, default=(1.0, ""))
            size = min((world.size(source, self._phase, self._batch) for source in sources), default=1.0)
            part = total if size - done == 1 else total * max(0.0, size - done)
            if on_devices:
                world.hold(self._pool)
            began = world.clock.now
            yield part
            world.worked(self._pool, began, 1.0)
            if on_devices:
                world.release(self._pool)
            done = size
            if share >= 1:
                return
            yield from self._share(slowest, share)

    def _again(self, stages: frozenset[str], step: int) -> Process:
        """The instructions of these stages once more, with further prompts: a block of time each."""
        world, pool = self._world, self._pool
        for instruction in self._program.step:
            if not isinstance(instruction, TakeRows | RunStage | WaitStage) or instruction.stage not in stages:
                continue
            stage, us = world.stage(instruction.stage), world.durations.of(instruction.stage, step)
            if isinstance(instruction, WaitStage):
                while (stage.id, self._batch) not in self._done:
                    yield Wait(self._collected, f"the result of {stage.id} for a further round")
                self._done.discard((stage.id, self._batch))
            elif isinstance(stage.op, Score):
                world.clock.start(stage.id, self._call_again(stage, us, step, self._batch))
            elif not (isinstance(instruction, TakeRows) and instruction.queue):
                world.hold(pool)
                began = world.clock.now
                yield us
                world.worked(pool, began, 1.0)
                world.release(pool)

    def _call_again(self, stage: Stage, us: Time, step: int, batch: int) -> Process:
        started = self._world.clock.now
        yield from self._world.workers[stage.pool].call(us)
        self._world.note_call(stage, step, started)
        self._done.add((stage.id, batch))
        self._world.clock.fire(self._collected)

    def _call(self, stage: Stage, step: int, batch: int) -> Process:
        """A Python stage on its workers."""
        world = self._world
        for queue in world.queues_of(stage.id):
            yield from queue.reserve(batch)
        yield from self._rest()
        started = world.clock.now
        us = world.durations.of(stage.id, step)
        if stage.id in world.calls and stage.phase == STEP:
            us *= world.calls[stage.id].stretch(step)
        yield from world.workers[stage.pool].call(us)
        world.note_call(stage, step, started)
        self._done.add((stage.id, batch))
        world.clock.fire(self._collected)

    # --- weights and memory ------------------------------------------------------------------------------------------

    def _reshard(self, instruction: ReshardWeights, step: int) -> _Timed:
        """Returns when the transfer began."""
        world, book, model = self._world, self._world.weights, instruction.model
        now_reading = [reader for reader in instruction.readers if world.stage(reader).phase == self._phase]
        least = book.required(model, now_reading, step) if self._phase == STEP else step
        yield from book.newest(model, least)
        started = world.clock.now
        version = book.published.get(model, 0)
        if book.copies.get(instruction.readers, 0) == version:
            return started  # nothing newer to bring
        world.hold(self._pool)
        moved = book.reshard(instruction.readers)
        us = world.durations.of(f"reshard {model}", step, 0 if moved is None else moved.us)
        if moved is None:
            yield us
        else:
            out, into = world.links[moved.source].out, world.links[self._pool].into
            busiest = max(moved.sent, moved.busiest, 1)
            sends = us if moved.sent == busiest else us * moved.sent / busiest
            receives = us if moved.busiest == busiest else us * moved.busiest / busiest
            yield from transfer(world.clock, us, [(out, sends, moved.sent), (into, receives, moved.busiest)])
        world.release(self._pool)
        book.copies[instruction.readers] = version
        book.load(instruction.readers, version)
        return started

    def _copy_ahead(self, move: MoveObject, step: int) -> None:
        """The part of a copy that runs beside stages before the instruction that waits for it."""
        link = self._world.links[self._pool].from_host
        hidden = move.us - move.exposed_us
        self._copies[move.id, step] = link.hold(hidden, round(move.bytes * hidden / move.us))

    def _move(self, move: MoveObject, step: int) -> Process:
        """Copies to the host go on beside the stages after them, copies from it have begun beside those before."""
        world = self._world
        if not move.from_host or not move.us:
            yield move.exposed_us
            return
        links = world.links[self._pool]
        exposed = round(move.bytes * move.exposed_us / move.us)
        if move.kind == "onload" and move.us > move.exposed_us:
            if (move.id, step) not in self._copies and not (step == 0 and move.id in self._there):
                self._copy_ahead(move, step)  # no stage before it takes any time
            ready = self._copies.pop((move.id, step), world.clock.now)
            if ready > world.clock.now:
                yield ready - world.clock.now
        link = links.from_host if move.kind == "onload" else links.to_host
        if move.exposed_us:
            link.interrupt(move.exposed_us, exposed)
            yield move.exposed_us
        if move.kind == "offload" and move.us > move.exposed_us:
            link.hold(move.us - move.exposed_us, move.bytes - exposed)
