"""The samples of one generate stage on their way to training, over all replicas that sample. No clock, no transport.

Every decision is the protocol's `Controller`, as in the simulator. Here each group gets a prompt (a position in the
data's order) and a replica, and what the replicas say is passed on. Steps of the runtime count from 1: its step i + 1
is the controller's step i.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.protocol.controller import Controller
from rlflow.protocol.cursor import DataCursor
from rlflow.protocol.samples import Phase
from rlflow.protocol.settings import Settings


@dataclass(frozen=True)
class Ticket:
    """A group to be sampled."""

    position: int
    """Of its prompt in the data's order."""
    samples: tuple[int, ...]
    """Ids of its samples, by their number in the group."""


@dataclass(frozen=True)
class Orders:
    """What a replica is to do next."""

    tickets: tuple[Ticket, ...] = ()
    drop: tuple[int, ...] = ()
    """Positions of groups that were given up."""
    version: int = 0
    """The newest version to load; 0: no new one."""

    def __bool__(self) -> bool:
        return bool(self.tickets or self.drop or self.version)


@dataclass(slots=True)
class _Group:
    position: int
    replica: int
    samples: tuple[int, ...]


@dataclass(slots=True)
class _Replica:
    loaded: int
    told: int
    """The newest version that it was told of."""
    tickets: list[Ticket] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)
    unfinished: int = 0
    """Samples that it has or will be told of."""


class SampleEdge:
    """`done` steps are over, the run ends after step `last`. `early`: a step's samples may be fixed before it starts.

    Raises `ProtocolError` for what cannot happen in a run that keeps to the protocol.
    """

    def __init__(
        self, settings: Settings, replicas: int, done: int, last: int, *, early: bool, cursor: DataCursor | None = None
    ) -> None:
        self.controller = Controller(settings, version=done)
        self.cursor = cursor or DataCursor()
        self.last = last
        self.trained_steps = done
        self.wanted = done
        """The last step that training has begun, or waits for."""
        self.asked = done
        """The last step whose samples the replicas asked for."""
        self.steps: dict[int, tuple[int, ...]] = {}
        """Step to its groups, until it is trained."""
        self._early = early
        self._groups: dict[int, _Group] = {}
        """Admitted, and neither trained on nor given up."""
        self._group_of: dict[int, int] = {}
        self._replicas = [_Replica(done, done) for _ in range(replicas)]
        self.settle()

    # --- what replicas ask --------------------------------------------------------------------------------------------

    def orders(self, replica: int) -> Orders:
        """What is new for a replica; told once."""
        r = self._replicas[replica]
        version = self._announced()
        found = Orders(tuple(r.tickets), tuple(r.drop), version if version > r.told else 0)
        r.tickets, r.drop, r.told = [], [], max(r.told, version)
        return found

    def has_orders(self, replica: int) -> bool:
        r = self._replicas[replica]
        return bool(r.tickets or r.drop) or self._announced() > r.told

    def positions(self, step: int, replica: int) -> list[int] | None:
        """The prompts of a step's groups that the replica has made, in the order of training; None: not known yet."""
        if step not in self.steps:
            return None
        return [g.position for id in self.steps[step] if (g := self._groups[id]).replica == replica]

    # --- what happened ------------------------------------------------------------------------------------------------

    def began(self, samples: Iterable[int], version: int) -> None:
        """They are being generated with these weights."""
        for id in samples:
            if self._phase(id) is Phase.ADMITTED:
                self.controller.begin(id, version)

    def paused(self, tokens: Mapping[int, int], version: int) -> None:
        """They stopped, each after so many more tokens of this version, and will go on."""
        for id, count in tokens.items():
            if self._phase(id) is Phase.RUNNING:
                self.controller.extend(id, version, count)
                self.controller.interrupt(id)

    def finished(self, samples: Iterable[int]) -> None:
        for id in samples:
            if self._phase(id) is Phase.RUNNING:
                self.controller.finish(id)
                self._replicas[self._groups[self._group_of[id]].replica].unfinished -= 1
        self.settle()

    def reject(self, position: int, reason: str) -> None:
        """A group failed or was filtered before a step took it: its credits come back, its prompt has ended."""
        for id, group in self._groups.items():
            if group.position == position:
                self._count_out(group)
                self.controller.reject(id, reason)
                self._forget(id, reason)
                break
        self.settle()

    def loaded(self, replica: int, version: int) -> None:
        """The replica samples with this version from now on."""
        self._replicas[replica].loaded = version
        self._publish()

    def want(self, step: int) -> None:
        """Training is about to begin the step."""
        self.wanted = max(self.wanted, step)
        self.settle()

    def ask(self, step: int) -> None:
        """The replicas have nothing left to do but this step."""
        self.asked = max(self.asked, step)
        self.settle()

    def trained(self, step: int) -> None:
        """The step has ended, and its version is on its way."""
        if step <= self.trained_steps:
            return  # another rank of the same step
        self.controller.trained(step - 1)
        for id in self.steps.pop(step):
            self._forget(id, "trained")
        self.trained_steps = step
        self._publish()

    # --- inside -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Admits what may enter and starts the steps that may start."""
        again = True
        while again:
            self._admit()
            again = self._start()

    def _admit(self) -> None:
        c = self.controller
        most = c.settings.batch // c.gate.group
        while c.capacity and len(c.rule.units) < (self.last - c.step) * most:
            samples = c.admit()
            position = self.cursor.issue()
            assert position is not None, "the data goes on from its beginning"
            number = min(range(len(self._replicas)), key=lambda r: (self._replicas[r].unfinished, r))
            replica = self._replicas[number]
            replica.unfinished += len(samples)
            replica.tickets.append(Ticket(position, samples))
            group = c.samples[samples[0]].group
            self._groups[group] = _Group(position, number, samples)
            self._group_of.update(dict.fromkeys(samples, group))

    def _start(self) -> bool:
        """Starts a step if it may; whether something changed that others may be admitted for."""
        c = self.controller
        step = c.step + 1
        if step > self.last or step > (self.asked if self._early else min(self.asked, self.wanted)):
            return False
        for id in c.too_old():
            group = self._groups[self._group_of[id]]
            if self._phase(id) in (Phase.ADMITTED, Phase.RUNNING):
                self._replicas[group.replica].unfinished -= 1
        answer = c.poll()
        for number in dict.fromkeys(self._group_of[id] for id in answer.dropped):
            self._tell_dropped(self._groups[number])
            self._forget(number, "too old")
        if answer.batch is not None:
            self.steps[step] = answer.batch.groups
        return answer.batch is not None or bool(answer.dropped)

    def _count_out(self, group: _Group) -> None:
        """It leaves: its unfinished samples are no load any more."""
        open_ = sum(self._phase(id) in (Phase.ADMITTED, Phase.RUNNING) for id in group.samples)
        self._replicas[group.replica].unfinished -= open_
        self._tell_dropped(group)

    def _tell_dropped(self, group: _Group) -> None:
        replica = self._replicas[group.replica]
        if any(ticket.position == group.position for ticket in replica.tickets):
            replica.tickets = [ticket for ticket in replica.tickets if ticket.position != group.position]
        else:
            replica.drop.append(group.position)

    def _forget(self, group: int, how: str) -> None:
        gone = self._groups.pop(group)
        for id in gone.samples:
            del self._group_of[id]
        self.cursor.end(gone.position, how)

    def _phase(self, sample: int) -> Phase | None:
        found = self.controller.samples.get(sample)
        return None if found is None else found.phase

    def _announced(self) -> int:
        """No replica gets further ahead of the others than one version: what enters does so at a version of all."""
        return min(self.trained_steps, self.controller.gate.version + 1)

    def _publish(self) -> None:
        version = min(replica.loaded for replica in self._replicas)
        if version > self.controller.gate.version:
            self.controller.publish(version)
        self.settle()

    # --- for people and checkpoints -----------------------------------------------------------------------------------

    def cursor_json(self) -> dict[str, Any]:
        """The data cursor at the trained frontier: the prompts of trained steps have ended, all others come again."""
        return self.cursor.to_json()

    def describe(self) -> str:
        """What is under way, in a line."""
        c = self.controller
        loaded = ", ".join(str(replica.loaded) for replica in self._replicas)
        decided = c.rule.decide(c.step, c.gate.batches).waits_for or "training to ask for it"
        return (
            f"step {c.step + 1} waits for {decided}; {len(c.rule.arrived)} of {len(c.rule.units)} groups are finished, "
            f"{c.gate.free} places free; step {self.trained_steps} is trained; replicas have version {loaded}"
        )

    def facts(self) -> dict[str, Any]:
        """What became of the samples so far."""
        return self.controller.tally.to_json()
