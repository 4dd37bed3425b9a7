"""Samples on their way from generation to training: the protocol's controller, with signals and a memory of batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rlflow.backends.simulator.clock import Clock, Signal
from rlflow.plan import Stage, StaleReader
from rlflow.protocol.controller import Batch, Controller


@dataclass(slots=True, eq=False)
class Edge:
    """The samples of one generate stage. Every decision is the controller's.

    `rows` samples of the flow stand behind one of the controller's: 1 where samples run singly, the batch where a stage
    is one block of time.
    """

    stage: Stage
    stale: StaleReader | None
    controller: Controller
    clock: Clock
    rows: int = 1
    trained_elsewhere: bool = True
    """Whether versions come from a training; without one a batch counts as trained as soon as it is taken."""
    changed: Signal = field(default_factory=Signal)
    listeners: list[Callable[[], None]] = field(default_factory=list)
    """Called when the edge has changed."""
    dropping: list[Callable[[Iterable[int]], None]] = field(default_factory=list)
    """Called with samples that were given up as too old."""
    ages: dict[int, Counter[int]] = field(default_factory=dict)
    """Step to the ages of its samples."""
    tokens: Counter[int] = field(default_factory=Counter)
    """Step to the response tokens that it trains on."""
    loaded: int = 0
    """Version that generates."""
    _complete: set[int] = field(default_factory=set)
    """Steps that have their whole batch."""
    _size: dict[int, float] = field(default_factory=dict)
    """Step to the samples that it has, over those of a full batch: a batch that carried samples leave is smaller."""
    _trained: int = 0
    """Steps whose training has ended."""

    def share(self, step: int) -> float | None:
        """The share of the step's batch that may be read now; None: the step may not start yet."""
        c = self.controller
        if step == c.step:
            answer = c.poll()
            for told in self.dropping:
                told(answer.dropped)
            if answer.batch is not None:
                self._add(answer.batch)
            if answer.batch is not None or answer.dropped:
                self._settle()
                self.notify()
        elif step == c.step - 1 and step in self._size and step not in self._complete:
            more = c.more()
            if more is not None:
                self._add(more)
                self._settle()
                self.notify()
        return 1.0 if step in self._complete else self._size.get(step)

    def size(self, step: int) -> float:
        """How many samples the step has so far, over those of a full batch."""
        return self._size.get(step, 0.0)

    def missing(self, step: int) -> str:
        """What the step waits for, in words."""
        decided = self.controller.rule.decide(self.controller.step, self.controller.gate.batches)
        return f"samples of {self.stage.id} for step {step} ({decided.waits_for or 'the rest of its batch'})"

    def load(self, version: int) -> None:
        """The engines have this version now."""
        self.loaded = version
        self._settle()
        self.notify()

    def trained(self, step: int) -> None:
        """The training of the step has ended."""
        self._trained = step + 1
        self._settle()

    def notify(self) -> None:
        """Something has changed that others may wait for."""
        self.clock.fire(self.changed)
        for told in self.listeners:
            told()

    def finished_rounds(self, step: int) -> bool:
        """Whether so much is finished that the step and those before it could start, by number of samples."""
        c = self.controller
        if c.step > step:
            return True
        batch = c.gate.batches.at(step)
        least = c.trigger.start(batch, c.gate.group) if c.trigger.same_batch else c.trigger.least(batch, c.gate.group)
        each = c.trigger.least(batch, c.gate.group)
        open_steps = [it for it in c.steps.values() if not it.complete]
        owed = sum(batch - len(it.groups) * c.gate.group for it in open_steps)
        return len(c.rule.arrived) * c.gate.group >= owed + (step - c.step) * each + least

    def arrived(self, step: int) -> float:
        """The share of the step's batch that is finished, in whole groups; 1 once the step has begun."""
        c = self.controller
        return len(c.rule.arrived) * c.gate.group / c.gate.batches.at(step) if step == c.step else 1.0

    def _add(self, batch: Batch) -> None:
        c = self.controller
        ages = self.ages.setdefault(batch.step, Counter())
        for age in batch.ages:
            ages[age] += self.rows
        self.tokens[batch.step] += sum(sample.tokens for sample in batch.samples)
        places = len(batch.groups) * c.gate.group
        self._size[batch.step] = places / c.gate.batches.at(batch.step) + self._size.get(batch.step, 0)
        if batch.complete:
            self._complete.add(batch.step)
        if batch.complete and not self.trained_elsewhere:
            self._trained = self.loaded = batch.step + 1

    def _settle(self) -> None:
        """Tells the controller of trainings and versions, once it has the steps that they are of."""
        c = self.controller
        for step, it in list(c.steps.items()):
            if step < self._trained and it.complete and not it.trained:
                c.trained(step)
        ready = [step + 1 for step, it in c.steps.items() if it.trained and step < self.loaded]
        if ready and max(ready) > c.gate.version:
            c.publish(max(ready))
