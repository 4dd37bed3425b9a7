"""A generate stage on its engines, sample by sample.

What is admitted, which samples a step gets, how old they are: the edge's controller says it. Engines run samples to
their drawn lengths. A stage with an admission rule or a trigger goes on generating while its pool waits for something
else; any other one generates during its instruction only.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from math import inf

from rlflow.backends.simulator.clock import Process, Signal, Time, Wait
from rlflow.backends.simulator.engine import Engine
from rlflow.backends.simulator.engine_messages import EngineEvent, Request, Segments
from rlflow.backends.simulator.engine_settings import Band, BandedStep, EngineSettings, PrefillCost
from rlflow.backends.simulator.interpreter_edges import Edge
from rlflow.backends.simulator.interpreter_world import World
from rlflow.backends.simulator.run_migration import Migration, kept
from rlflow.backends.simulator.run_turns import Turns
from rlflow.cost.assumed_lengths import assumed_lengths
from rlflow.cost.occupancy import headroom
from rlflow.plan_decisions import EngineEstimate
from rlflow.protocol.ledger import Place
from rlflow.protocol.samples import Phase

Length = Callable[[int, int], int]
"""(prompt, sample of the prompt), both from 0, to the tokens of its response, at least 1."""


def settings_of_engine(facts: EngineEstimate, expected: int = 0) -> EngineSettings:
    """One engine, or those that share experts in lock step; `expected` tokens of a response, at admission."""
    return EngineSettings(
        step=BandedStep(tuple(Band(b, fixed, each, facts.token_s) for b, fixed, each in facts.bands)),
        slots=facts.slots,
        kv_blocks=facts.kv_tokens,
        expected=expected,
        prefill=PrefillCost(facts.prefill_token_s, facts.prefill_square_s, facts.prefill_context_s),
        step_tokens=max(facts.prefill_tokens, facts.slots),
        ranks=facts.lock_step,
    )


class EngineServer:
    """All engines of one stage. Times of the engines are seconds, those of the world microseconds."""

    def __init__(
        self,
        world: World,
        edge: Edge,
        facts: EngineEstimate,
        length: Length,
        expected: int | None = None,
        turns: Turns | None = None,
        migration: Migration | None = None,
    ) -> None:
        """`expected`: tokens of a response that engines reckon with at admission; None: as the estimates assume for as
        many samples as may be under way at once. `turns` of a response, between which it leaves its engine.
        `migration` of the last samples of a batch to few engines."""
        self._world = world
        self._edge = edge
        self._facts = facts
        self._length = length
        if expected is None:
            at_once = -(-edge.controller.gate.window // facts.replicas)
            expected = headroom(assumed_lengths(facts), facts.prompt_tokens, at_once, facts.slots, facts.kv_tokens)
        settings = settings_of_engine(facts, expected)
        self._engines = [Engine(settings) for _ in range(max(1, facts.replicas // facts.lock_step))]
        self._slots = facts.slots * facts.lock_step
        self._loads = [0] * len(self._engines)
        """Samples in each engine."""
        self._active = 0
        """Engines with samples."""
        self._alarms = [inf] * len(self._engines)
        """The event of each engine that the clock will wake it for."""
        self._new: deque[int] = deque()
        self._resumed: list[int] = []
        """Heap of samples that were interrupted."""
        self._recalled: set[int] = set()
        """Engines whose samples are interrupted at the end of the step under way: they go on before new ones begin."""
        self._turns = turns
        self._turn: dict[int, int] = {}
        """The turn of a sample, from 2 on."""
        self._migration = migration
        self._tail: tuple[int, ...] = ()
        """The engines that the last samples of a batch have gathered on; none otherwise."""
        self.moved: list[tuple[Time, int]] = []
        """(when samples of a batch gathered, how many left their engine)."""
        self._made: dict[int, Segments] = {}
        """What interrupted samples have made already."""
        self._engine_of: dict[int, int] = {}
        self._told = [0.0] * len(self._engines)
        """Seconds of the last command or event of each engine."""
        self._background = edge.stale is not None
        self._open = self._background
        self._holds = 0
        self._pace = 1.0
        self._busy_since: Time = 0
        self.thrown_out: list[tuple[Time, int]] = []
        """(when a full cache threw a sample out, tokens of its context, which are computed again)."""
        edge.listeners.append(self._settle)
        edge.dropping.append(self._abort)
        world.weights.loads[edge.stage.id].append(self._load)
        if self._background:
            world.clock.at(world.clock.now, self._settle)

    # --- the stage's instruction -------------------------------------------------------------------------------------

    def run(self, step: int) -> Process:
        edge = self._edge
        self._open = True
        self._settle()
        while not edge.finished_rounds(step) and not self._tail:
            yield Wait(edge.changed, f"samples of {edge.stage.id} for step {step} ({edge.controller.ledger})")
        self._open = self._background or bool(self._tail)
        if not edge.trained_elsewhere:
            edge.share(step)  # nobody trains the model: the next batch may begin

    def hold(self) -> None:
        self._account()
        if not self._holds and not self._tail:
            for number, engine in enumerate(self._engines):
                engine.pause(self._at(number))
                self._set_alarm(number)
        self._holds += 1

    def release(self) -> None:
        self._account()
        self._holds -= 1
        if not self._holds:
            for number, engine in enumerate(self._engines):
                engine.resume(self._at(number))
                self._set_alarm(number)

    @property
    def migrates(self) -> bool:
        """Whether the last samples of a batch gather on few engines."""
        return self._migration is not None

    @property
    def free(self) -> float:
        """The share of the devices that stages may use beside the last samples of a batch; 1 where none are left."""
        return 1 - len(self._tail) / len(self._engines)

    @property
    def changed(self) -> Signal:
        """Fired when groups are finished."""
        return self._edge.changed

    @property
    def busy(self) -> bool:
        """Whether samples are in its engines."""
        return self._active > 0

    def share(self, stages: int) -> None:
        """So many generate stages have samples on these devices, which go from one to the other step by step."""
        if self._pace != 1 / stages:
            self._account()
            self._pace = 1 / stages
            for number, engine in enumerate(self._engines):
                engine.set_speed(self._pace, self._at(number))
                self._set_alarm(number)

    # --- what the edge says ------------------------------------------------------------------------------------------

    def _load(self, version: int) -> None:
        """The engines get new weights: carried samples begin again with them, others go on."""
        trigger = self._edge.controller.trigger
        for number, engine in enumerate(self._engines):
            if trigger.carries and trigger.carry == "partial":
                engine.interrupt(self._at(number))
                if self._loads[number]:
                    self._recalled.add(number)
            engine.publish(version, self._at(number))
            self._set_alarm(number)
        self._edge.load(version)

    def _abort(self, ids: Iterable[int]) -> None:
        """The controller has given these samples up."""
        leaving: dict[int, list[int]] = {}
        for id in ids:
            self._made.pop(id, None)
            self._turn.pop(id, None)
            if id in self._engine_of:
                leaving.setdefault(self._engine_of[id], []).append(id)
        for number, gone in leaving.items():
            self._engines[number].abort(gone, self._at(number))
            self._set_alarm(number)

    def _settle(self) -> None:
        """Admits what the gate permits, and fills free slots: interrupted samples first, each in the order of ids."""
        controller = self._edge.controller
        if not self._open:
            return
        while controller.capacity:
            self._new.extend(controller.admit())
        if self._recalled:
            return
        was_busy = self.busy
        requests: dict[int, list[Request]] = {}
        version = controller.gate.version
        while self._resumed or self._new:
            number = min(self._tail or range(len(self._loads)), key=self._loads.__getitem__)
            if self._loads[number] >= self._slots:
                break
            id = heapq.heappop(self._resumed) if self._resumed else self._new.popleft()
            sample = controller.samples.get(id)
            if sample is None or sample.phase is not Phase.ADMITTED:
                continue
            controller.begin(id, version)
            self._account()
            self._engine_of[id] = number
            self._active += not self._loads[number]
            self._loads[number] += 1
            member = controller.groups[sample.group].members.index(id)
            segments = self._made.pop(id, ())
            length = self._length(sample.group, member)
            if self._turns is not None:
                length = self._turns.end(length, self._turn.get(id, 1))
            length = max(length, sum(tokens for _, tokens in segments) + 1)
            request = Request(id, self._facts.prompt_tokens, length, sample.group, segments)
            requests.setdefault(number, []).append(request)
        for number, batch in requests.items():
            self._engines[number].submit(batch, self._at(number))
            self._set_alarm(number)
        self._gather()
        if self.busy != was_busy:
            self._world.shared(self._edge.stage.pool)

    def _gather(self) -> None:
        """Moves the last samples of a batch together, once, when nothing else waits for a slot."""
        if self._migration is None or self._tail or self._new or self._resumed:
            return
        controller, running = self._edge.controller, len(self._engine_of)
        batch = controller.gate.batches.at(controller.step)
        if running != controller.ledger.credits[Place.RUNNING] or not self._migration.due(running, batch):
            return
        self._tail = kept(self._loads, self._facts) or ()
        leaving: dict[int, list[int]] = {}
        for id, number in self._engine_of.items():
            if self._tail and number not in self._tail:
                leaving.setdefault(number, []).append(id)
        for number, ids in leaving.items():
            self._engines[number].interrupt(self._at(number), ids)
            self._set_alarm(number)
        if self._tail:
            self.moved.append((self._world.clock.now, sum(map(len, leaving.values()))))
            self._world.clock.fire(self._edge.changed)

    # --- what the engines say ----------------------------------------------------------------------------------------

    def _at(self, number: int) -> float:
        """This instant for an engine. Rounding may put it a little beside the engine's own events."""
        now = max(float(self._world.clock.now) / 1e6, self._told[number])
        self._told[number] = min(now, self._engines[number].next_time())
        return self._told[number]

    def _set_alarm(self, number: int) -> None:
        due = self._engines[number].next_time()
        if due == self._alarms[number]:
            return
        self._alarms[number] = due
        if due != inf:
            clock = self._world.clock
            clock.at(max(clock.now, due * 1e6), lambda: self._wake(number, due))

    def _wake(self, number: int, due: float) -> None:
        if self._alarms[number] != due:
            return  # a command has changed it since
        self._alarms[number], self._told[number] = inf, due
        finished = False
        for event in self._engines[number].advance_to(due):
            finished |= self._happened(number, event)
        self._set_alarm(number)
        if self._tail and not self.busy and not self._resumed:
            self._tail, self._open = (), self._background
            self._world.clock.fire(self._edge.changed)
        if not self.busy:
            self._world.shared(self._edge.stage.pool)
        if finished:
            self._edge.notify()
        self._settle()

    def _happened(self, number: int, event: EngineEvent) -> bool:
        """Whether a sample is finished."""
        if event.kind == "preempted":
            context = self._facts.prompt_tokens + sum(tokens for _, tokens in event.segments)
            self.thrown_out.append((self._world.clock.now, context))
            return False
        if event.kind not in ("finished", "interrupted", "aborted"):
            return False
        id = event.id
        assert isinstance(id, int)
        self._account()
        del self._engine_of[id]
        self._loads[number] -= 1
        self._active -= not self._loads[number]
        if not self._loads[number]:
            self._recalled.discard(number)
        controller = self._edge.controller
        sample = controller.samples.get(id)
        if sample is None or sample.phase is not Phase.RUNNING:
            return False  # given up meanwhile
        known = {segment.version: segment.tokens for segment in sample.segments}
        for version, tokens in event.segments:
            if not self._edge.trained_elsewhere:
                version = sample.version  # the weights are always the same, and batches count as versions
            more = tokens - known.get(version, 0)
            if more:
                controller.extend(id, version, more)
        if event.kind == "finished" and self._another_turn(id, event.segments):
            return False
        if event.kind == "interrupted":
            controller.interrupt(id)
            self._made[id] = event.segments
            heapq.heappush(self._resumed, id)
            return False
        self._turn.pop(id, None)
        controller.finish(id)
        return True

    def _another_turn(self, id: int, segments: Segments) -> bool:
        """Whether the environment answers the sample, which then comes back: to any engine, its context to be computed
        again."""
        if self._turns is None:
            return False
        controller, turn = self._edge.controller, self._turn.get(id, 1)
        group = controller.samples[id].group
        member = controller.groups[group].members.index(id)
        made = sum(tokens for _, tokens in segments)
        if turn >= self._turns.count or made >= self._length(group, member):
            return False
        controller.interrupt(id)
        self._made[id], self._turn[id] = segments, turn + 1
        clock = self._world.clock
        clock.at(clock.now + self._turns.wait(group, member, turn), lambda: self._answered(id))
        return True

    def _answered(self, id: int) -> None:
        heapq.heappush(self._resumed, id)
        self._settle()

    def _account(self) -> None:
        """Books the time since the last change as that of the engines that had samples."""
        now = self._world.clock.now
        if now > self._busy_since and (self._tail or not self._holds) and self._active:
            share = self._pace * self._active / len(self._engines)
            self._world.record.work[self._edge.stage.pool].append((self._busy_since, now, share))
        self._busy_since = now
