"""One edge from generation to training: gate, rule, trigger, ledger and samples kept in step with each other.

The caller says what happened (a sample got a slot, finished, failed; a step is trained, a version published), and asks
what may be admitted and whether the next step may start. Every call takes effect whole or raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlflow.protocol.book import Book, Group, OpenStep
from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.evict import Evict
from rlflow.protocol.ledger import Place
from rlflow.protocol.rules import Wait
from rlflow.protocol.samples import Phase, Sample
from rlflow.protocol.units import Decision, Unit


@dataclass(frozen=True, slots=True)
class Batch:
    """What step `step` trains on, or what it gets in addition."""

    step: int
    samples: tuple[Sample, ...]
    """Consumed samples, groups together."""
    groups: tuple[int, ...]
    complete: bool = True
    """False where the step may train on these already but has to train on more (`Controller.more`)."""

    @property
    def ages(self) -> tuple[int, ...]:
        return tuple(sample.age(self.step) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Answer:
    """Of `Controller.poll`."""

    batch: Batch | None
    """The next step's, which has now started; None: not yet."""
    dropped: tuple[int, ...] = ()
    """Samples given up as too old: those of `Controller.too_old` before."""
    waits_for: str = ""


class Controller(Book):
    """Admission and consumption of one edge. `version`: the version of a resumed run, which starts without samples."""

    # --- admission ----------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Samples that may be admitted now, in whole groups."""
        # Steps may run ahead of the publication. What `evict` would drop before its first step is not let in: dropping
        # returns the credit, so it would be let in and dropped for ever.
        late = isinstance(self.rule, Evict) and self.step - self.gate.version > self.gate.bound
        return 0 if self.closed or late else self.gate.capacity

    def admit(self) -> tuple[int, ...]:
        """One group enters: the ids of its samples, which rise from 0; its own id is `samples[id].group`."""
        if self.closed:
            raise ProtocolError("the source was closed: nothing more is admitted")
        if self.capacity < self.gate.group <= self.gate.capacity:
            raise ProtocolError(f"a sample of version {self.gate.version} would be too old for step {self.step}")
        size = self.gate.group
        version = self.gate.admit(size)
        self.ledger.move(Place.FREE, Place.RUNNING, size)
        deadline = self.trigger.deadline(version, self.gate.bound, self.gate.batches, size)
        group, self.next_group = self.next_group, self.next_group + 1
        ids = tuple(range(self.next_sample, self.next_sample + size))
        self.next_sample += size
        self.rule.add(Unit(group, version, deadline))
        self.groups[group] = Group(list(ids))
        self.samples.update((id, Sample(id, group, version)) for id in ids)
        self.tally.admitted += size
        return ids

    def close(self) -> None:
        """End of the data: the last steps may be short, and nothing is lost."""
        self.closed = True

    # --- steps --------------------------------------------------------------------------------------------------------

    def too_old(self) -> tuple[int, ...]:
        """Samples that the next `poll` gives up (only under `evict`): the place to stop those that run and note their
        tokens with `extend`."""
        if not isinstance(self.rule, Evict):
            return ()
        return tuple(id for group in self.rule.expired(self.step) for id in self.groups[group].members)

    def poll(self) -> Answer:
        """Starts the next step if the rule lets it. What is too old for it is dropped, which frees credits."""
        if any(not step.complete for step in self.steps.values()):
            return Answer(None, waits_for=f"the rest of step {self.step - 1}")
        decision = self._decide()
        dropped: list[int] = []
        for group in decision.drop:
            dropped += self.groups[group].members
            self._leave(group, "too old", Phase.ABORTED)
        if dropped:
            decision = self._decide()
        if not decision.ready:
            return Answer(None, tuple(dropped), decision.waits_for)
        step, self.step = self.step, self.step + 1
        self.steps[step] = OpenStep()
        return Answer(self._take(step, decision.take), tuple(dropped))

    def more(self) -> Batch | None:
        """What the step that started early may train on in addition; None: nothing yet."""
        step = self.step - 1
        if step not in self.steps or self.steps[step].complete:
            raise ProtocolError(f"step {step} has its whole batch or is published")
        room = self._most(step) - len(self.steps[step].groups)
        take = self.rule.early(step, room, self.gate.batches)
        complete = self.closed and not self.rule.units
        return self._take(step, take) if take or complete else None

    def trained(self, step: int) -> None:
        """The step has ended; its version is not published yet."""
        open_step = self.steps.get(step)
        if open_step is None or open_step.trained or not open_step.complete:
            raise ProtocolError(f"step {step} is not in training with its whole batch")
        if any(other < step and not it.trained for other, it in self.steps.items()):
            raise ProtocolError(f"step {step} trained before an earlier one")
        open_step.trained = True
        self.ledger.move(Place.TRAINING, Place.SYNCING, len(open_step.groups) * self.gate.group)

    def publish(self, version: int) -> None:
        """All engines have loaded `version`: the credits of the steps before it come back."""
        done = [step for step in self.steps if step < version]
        if version > self.step or not all(self.steps[step].trained for step in done):
            raise ProtocolError(f"version {version} is not trained yet")
        groups = [group for step in done for group in self.steps[step].groups]
        credits = len(groups) * self.gate.group
        self.gate.publish(version, credits)
        self.ledger.move(Place.SYNCING, Place.FREE, credits)
        self.ledger.resize(self.gate.window)
        for group in groups:
            for id in self.groups.pop(group).members:
                del self.samples[id]
        for step in done:
            del self.steps[step]

    def change_bound(self, bound: int) -> None:
        """See `CountGate.change_bound`. Samples already out keep their deadline."""
        self.gate.change_bound(bound)
        if isinstance(self.rule, Wait | Evict):
            self.rule.bound = bound
        self.ledger.resize(self.gate.window)

    def change_batch(self, batch: int, from_step: int | None = None) -> int:
        """The batch from `from_step` on, by default the first step that no sample can be due at; that step.

        See `CountGate.change_batch`. A step that has started cannot change (ValueError).
        """
        if from_step is not None and from_step < self.step:
            raise ValueError(f"step {from_step} has started with its batch")
        if from_step is None:  # no admitted sample may be due at it, whatever bound it was admitted under
            due = max((unit.deadline for unit in self.rule.units.values()), default=0)
            now = self.trigger.deadline(self.gate.version, self.gate.bound, self.gate.batches, self.gate.group)
            from_step = max(due + 1, now + 1, self.step)
        start = self.gate.change_batch(batch, from_step)
        self.ledger.resize(self.gate.window)
        return start

    # --- inside -------------------------------------------------------------------------------------------------------

    def _most(self, step: int) -> int:
        return self.gate.batches.at(step) // self.gate.group

    def _decide(self) -> Decision:
        if not self.trigger.same_batch:
            return self.rule.decide(self.step, self.gate.batches, closed=self.closed)
        start = self.trigger.start(self.gate.batches.at(self.step), self.gate.group) // self.gate.group
        least = min(start, len(self.rule.units)) if self.closed else start
        enough = len(self.rule.arrived) >= least
        take = self.rule.early(self.step, self._most(self.step), self.gate.batches) if enough else ()
        if len(take) < least or not take:
            return Decision(waits_for=f"{least} finished groups of the batch")
        return Decision(take)

    def _take(self, step: int, take: Iterable[int]) -> Batch:
        groups = tuple(take)
        samples: list[Sample] = []
        for group in groups:
            self.rule.remove(group)
            for id in self.groups[group].members:
                sample = self.samples[id] = self.samples[id].consume(step)
                self.tally.add(sample)
                samples.append(sample)
        self.ledger.move(Place.QUEUED, Place.TRAINING, len(groups) * self.gate.group)
        open_step = self.steps[step]
        open_step.groups += groups
        full = len(open_step.groups) == self._most(step) or (self.closed and not self.rule.units)
        open_step.complete = full or not self.trigger.same_batch
        return Batch(step, tuple(samples), groups, open_step.complete)
