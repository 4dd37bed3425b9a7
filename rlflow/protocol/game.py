"""A token game on the protocol: what happens under given durations. A discrete-event run with the clock as a heap.

Every decision is the controller's; the game only keeps time, slots and the order of waiting: interrupted and retried
samples before new ones, each in the order of ids.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rlflow.protocol.controller import Batch, Controller
from rlflow.protocol.generator import Generator, Time
from rlflow.protocol.samples import Phase
from rlflow.protocol.settings import Settings
from rlflow.protocol.world import Report, Trained, World


class Game:
    """`steps` steps of one edge, from `version` on. `watch` is called whenever all that can happen now has happened."""

    def __init__(
        self,
        settings: Settings,
        world: World,
        steps: int,
        *,
        version: int = 0,
        watch: Callable[[Game], None] | None = None,
    ) -> None:
        self.controller = Controller(settings, version)
        self.world = world
        self.last = version + steps
        self.report = Report()
        self.now: Time = 0
        self._watch = watch
        self._generator = Generator(world.step_time)
        self._slots = world.slots
        self._waiting: deque[int] = deque()
        self._resumed: list[int] = []
        """Heap of samples that had a slot before."""
        self._attempts: Counter[int] = Counter()
        self._groups_left = world.groups
        self._events: list[tuple[Time, int, Callable[[], None]]] = []
        self._count = 0
        self._trainer_busy = False
        self._halted = False
        """Training has the devices."""
        self._ready_for_more: int | None = None
        """The step that started early and has trained on all it got."""
        self._sync_free: Time = 0
        self._changes = sorted(world.changes, key=lambda change: change.version)
        self._waits_for = ""
        for time, slots in world.slot_changes:
            self._at(time, self._set_slots, slots)

    def run(self) -> Report:
        """Plays until the steps are published, the data is used up, or nothing can happen any more."""
        self._change()
        while True:
            self._settle()
            if self._watch:
                self._watch(self)
            if self.controller.gate.version >= self.last or self._used_up():
                break
            end = self._generator.next_end()
            timed = self._events[0][0] if self._events else None
            now = end if timed is None or (end is not None and end <= timed) else timed
            if now is None:
                self.report.deadlock = self._waits_for or "nothing happens"
                break
            self.now = now
            for sample in self._generator.advance(now):
                self._ended(sample)
            due: list[Callable[[], None]] = []
            while self._events and self._events[0][0] <= now:
                due.append(heapq.heappop(self._events)[2])
            for act in due:
                act()
        self.report.now = self.now
        self.report.tally = self.controller.tally
        return self.report

    # --- what can happen now ------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Admits, starts samples and steps, until nothing more can happen at this time."""
        again = True
        while again:
            again = self._admit()
            self._fill_slots()
            again |= self._start_step()

    def _admit(self) -> bool:
        c = self.controller
        while c.capacity and self._groups_left != 0:
            self._waiting += c.admit()
            if self._groups_left is not None:
                self._groups_left -= 1
        if self._groups_left == 0 and not c.closed:
            c.close()
            return True
        return False

    def _fill_slots(self) -> None:
        while not self._halted and (self._slots is None or len(self._generator) < self._slots):
            if self._resumed:
                sample = heapq.heappop(self._resumed)
            elif self._waiting:
                sample = self._waiting.popleft()
            else:
                return
            if not self._is_waiting(sample):
                continue
            self.controller.begin(sample, self.controller.gate.version)
            tokens = self.controller.samples[sample].tokens
            fails = self.world.fails(sample, self._attempts[sample])
            length = self.world.length(sample)
            self._generator.start(sample, tokens, max(tokens, length if fails is None else min(fails, length)))

    def _is_waiting(self, sample: int) -> bool:
        known = self.controller.samples.get(sample)
        return known is not None and known.phase is Phase.ADMITTED

    def _start_step(self) -> bool:
        if self._ready_for_more is not None:
            batch = self.controller.more()
            if batch is not None:
                self._ready_for_more = None
                self._train(batch)
            return batch is not None
        if self._trainer_busy or self.controller.step >= self.last:
            return False
        for sample in self.controller.too_old():
            if sample in self._generator:
                self._stop(sample)
        answer = self.controller.poll()
        if answer.batch is None:
            self._waits_for = f"step {self.controller.step} waits for {answer.waits_for}"
            return bool(answer.dropped)
        self.report.started.append(self.now)
        self._train(answer.batch)
        return True

    # --- training -----------------------------------------------------------------------------------------------------

    def _train(self, batch: Batch) -> None:
        step = batch.step
        for sample in batch.samples:
            age = sample.age(step)
            row = Trained(step, sample.id, sample.group, step - age, age, sample.tokens)
            self.report.samples.append(row)
        self._trainer_busy = True
        if self.world.colocated:
            self._halted = True
            for id in self._generator.running:
                self._interrupt(id)
        time = self.world.train(step)
        places = len(batch.groups) * self.controller.gate.group
        whole = self.controller.gate.batches.at(step)
        if self.controller.trigger.same_batch and places != whole:  # part of a batch takes part of the time
            time = time * places / whole if isinstance(time, float) else Fraction(time) * places / whole
        self._at(self.now + time, self._trained, batch)

    def _trained(self, batch: Batch) -> None:
        if not batch.complete:
            self._ready_for_more = batch.step
            self._halted = False  # the rest of the batch has to be generated
            return
        self.controller.trained(batch.step)
        self.report.trained.append(self.now)
        self._trainer_busy = self.world.waits_for_sync
        self._sync_free = max(self.now, self._sync_free) + self.world.sync(batch.step)
        self._at(self._sync_free, self._publish, batch.step + 1)

    def _publish(self, version: int) -> None:
        self.controller.publish(version)
        self.report.published.append(self.now)
        if self.world.waits_for_sync:
            self._trainer_busy = False
        self._halted = False
        trigger = self.controller.trigger
        if self.world.switch:
            for id in self._generator.running:
                self._note_tokens(id)
                self.controller.extend(id, version, 0)
        elif trigger.carries and trigger.carry == "partial":
            for id in self._generator.running:
                self._interrupt(id)
        self._change()

    def _change(self) -> None:
        while self._changes and self._changes[0].version <= self.controller.gate.version:
            change = self._changes.pop(0)
            if change.bound is not None:
                self.controller.change_bound(change.bound)
            if change.batch is not None:
                self.controller.change_batch(change.batch, change.from_step)

    # --- samples ------------------------------------------------------------------------------------------------------

    def _ended(self, id: int) -> None:
        """It has all its tokens, or those after which it fails."""
        if id not in self._generator:  # its group left at this very time
            return
        attempt = self._attempts[id]
        self._stop(id)
        if self.world.fails(id, attempt) is not None:
            self._attempts[id] += 1
            self._failed(id)
            return
        group = self.controller.samples[id].group
        self.controller.finish(id)
        self._filter(group)

    def _failed(self, id: int) -> None:
        group = self.controller.samples[id].group
        match self.world.on_failure:
            case "retry":
                self.controller.restart(id)
                heapq.heappush(self._resumed, id)
            case "replace":
                heapq.heappush(self._resumed, self.controller.replace(id, "failed"))
            case "lose":
                self.controller.lose(id, "failed")
                self._filter(group)
            case "reject":
                self._reject(group, "failed")

    def _filter(self, group: int) -> None:
        unit = self.controller.rule.units.get(group)
        if unit is not None and unit.finished and self.world.filtered(group):
            self._reject(group, "filtered")

    def _reject(self, group: int, reason: str) -> None:
        for id in self.controller.groups[group].members:
            if id in self._generator:
                self._stop(id)
        self.controller.reject(group, reason)

    def _stop(self, id: int) -> None:
        """Takes it out of its slot and notes its tokens."""
        known = self.controller.samples[id]
        made = self._generator.stop(id) - known.tokens
        self.controller.extend(id, known.segments[-1].version, made)

    def _note_tokens(self, id: int) -> None:
        """Notes the tokens of a sample that runs on."""
        known = self.controller.samples[id]
        made = self._generator.tokens(id) - known.tokens
        self.controller.extend(id, known.segments[-1].version, made)

    def _interrupt(self, id: int) -> None:
        self._stop(id)
        self.controller.interrupt(id)
        heapq.heappush(self._resumed, id)

    def _set_slots(self, slots: int) -> None:
        self._slots = slots
        for id in reversed(self._generator.running[slots:]):
            self._interrupt(id)

    def _used_up(self) -> bool:
        c = self.controller
        return c.closed and not c.rule.units and not c.steps

    def _at(self, time: Time, act: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (time, self._count, lambda: act(*args)))
        self._count += 1
