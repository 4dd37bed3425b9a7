"""The samples of one edge and their credits: every change of a sample moves its credit and tells the rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlflow.protocol.batches import BatchSizes
from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.evict import make_rule
from rlflow.protocol.gate import CountGate
from rlflow.protocol.ledger import Ledger, Place
from rlflow.protocol.samples import Phase, Sample
from rlflow.protocol.settings import Settings
from rlflow.protocol.tally import Tally


@dataclass(slots=True)
class Group:
    """Samples of one prompt."""

    members: list[int]
    """Sample ids; a replaced or lost sample is not among them."""
    lost: int = 0
    """Places kept for samples that are gone: the group goes on short."""


@dataclass(slots=True)
class OpenStep:
    """A step that has started and is not published."""

    groups: list[int] = field(default_factory=list)
    complete: bool = False
    trained: bool = False


class Book:
    """Samples, groups, steps, gate, ledger and rule of one edge, kept in step with each other."""

    def __init__(self, settings: Settings, version: int = 0) -> None:
        self.settings = settings
        sizes = BatchSizes.constant(settings.batch)
        self.gate = CountGate(settings.bound, sizes, settings.group, settings.burst, version)
        self.trigger = settings.trigger
        self.rule = make_rule(
            settings.rule,
            trigger=settings.trigger,
            bound=settings.bound,
            group=settings.group,
            oldest_first=settings.oldest_first,
        )
        self.ledger = Ledger(self.gate.window)
        self.samples: dict[int, Sample] = {}
        """Outstanding, and in steps that are not published."""
        self.groups: dict[int, Group] = {}
        self.steps: dict[int, OpenStep] = {}
        self.step = version
        """The next step to start."""
        self.closed = False
        self.tally = Tally()
        self.next_sample = 0
        self.next_group = 0

    def begin(self, sample: int, version: int) -> None:
        self._set(self._sample(sample).begin(version))

    def extend(self, sample: int, version: int, tokens: int) -> None:
        self._set(self._sample(sample).extend(version, tokens))

    def interrupt(self, sample: int) -> None:
        """It loses its slot and keeps its tokens; it should be resumed before new ones."""
        self._set(self._sample(sample).interrupt())

    def restart(self, sample: int) -> None:
        """A retry: it loses its slot and its tokens."""
        before = self._sample(sample)
        self._set(before.restart())
        self.tally.wasted_tokens += before.tokens

    def finish(self, sample: int) -> None:
        self._set(self._sample(sample).finish())
        self.ledger.move(Place.RUNNING, Place.QUEUED, 1)
        self._finish_group(self.samples[sample].group)

    def replace(self, sample: int, reason: str) -> int:
        """It failed or was filtered, and a new sample takes its place in the group; the id of that."""
        before = self._sample(sample)
        group = self._outstanding(before.group)
        if self.rule.units[before.group].finished:
            raise ProtocolError(f"group {before.group} is finished: reject it whole")
        self._end(before.reject(reason))
        if before.phase is Phase.FINISHED:
            self.ledger.move(Place.QUEUED, Place.RUNNING, 1)
        id, self.next_sample = self.next_sample, self.next_sample + 1
        group.members[group.members.index(sample)] = id
        self.samples[id] = Sample(id, before.group, self.gate.version)
        self.tally.admitted += 1
        self._age_group(before.group)
        return id

    def lose(self, sample: int, reason: str) -> None:
        """It failed or was filtered, and its group goes on short: the place stays the group's. The last one ends it."""
        before = self._sample(sample)
        group = self._outstanding(before.group)
        if len(group.members) == 1:
            self.reject(before.group, reason)
            return
        self._end(before.reject(reason))
        if before.phase is not Phase.FINISHED:
            self.ledger.move(Place.RUNNING, Place.QUEUED, 1)
        group.members.remove(sample)
        group.lost += 1
        self._age_group(before.group)
        if not self.rule.units[before.group].finished:
            self._finish_group(before.group)

    def reject(self, group: int, reason: str) -> tuple[int, ...]:
        """The group was filtered, timed out or failed: its credits come back at once. Its samples that were running."""
        return self._leave(group, reason, Phase.REJECTED)

    def check(self) -> None:
        """Raises `ProtocolError` unless gate, ledger and a count of the samples agree."""
        counted = dict.fromkeys(Place, 0)
        for id in self.rule.units:
            counted[Place.QUEUED] += self.groups[id].lost
            for member in self.groups[id].members:
                finished = self.samples[member].phase is Phase.FINISHED
                counted[Place.QUEUED if finished else Place.RUNNING] += 1
        for step in self.steps.values():
            counted[Place.SYNCING if step.trained else Place.TRAINING] += len(step.groups) * self.gate.group
        counted[Place.FREE] = self.gate.window - sum(counted.values())
        if counted[Place.FREE] != self.gate.free:
            raise ProtocolError(f"{self.gate.held} credits are held, but {counted} were counted")
        self.ledger.check(counted)

    def _leave(self, group: int, reason: str, phase: Phase) -> tuple[int, ...]:
        """The group goes with all its samples; those of them that were running."""
        members = self._outstanding(group).members
        before = [self.samples[id] for id in members]
        unfinished = sum(sample.phase is not Phase.FINISHED for sample in before)
        for sample in before:
            self._end(sample.reject(reason) if phase is Phase.REJECTED else sample.abort(reason))
        self.rule.remove(group)
        del self.groups[group]
        self.ledger.move(Place.RUNNING, Place.FREE, unfinished)
        self.ledger.move(Place.QUEUED, Place.FREE, self.gate.group - unfinished)
        self.gate.refund(self.gate.group)
        return tuple(sample.id for sample in before if sample.phase is Phase.RUNNING)

    def _end(self, sample: Sample) -> None:
        self.tally.add(sample)
        del self.samples[sample.id]

    def _set(self, sample: Sample) -> None:
        before = self.samples[sample.id]
        self.samples[sample.id] = sample
        if sample.birth != before.birth:
            self._age_group(sample.group)

    def _age_group(self, group: int) -> None:
        births = [self.samples[id].birth for id in self.groups[group].members]
        birth = min((b for b in births if b is not None), default=None)
        if birth != self.rule.units[group].birth:
            self.rule.born(group, birth)

    def _finish_group(self, group: int) -> None:
        if all(self.samples[id].phase is Phase.FINISHED for id in self.groups[group].members):
            self.rule.finish(group)

    def _sample(self, id: int) -> Sample:
        if id not in self.samples:
            raise ProtocolError(f"sample {id} is not outstanding: it was never admitted, or has ended")
        return self.samples[id]

    def _outstanding(self, group: int) -> Group:
        if group not in self.rule.units:
            raise ProtocolError(f"group {group} is not outstanding: it was never admitted, or has ended")
        return self.groups[group]
