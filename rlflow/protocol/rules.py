"""Consumption rules: from the outstanding groups, whether step i may start and with which.

| rule | starts when | takes | worst age |
|---|---|---|---|
| `in_order` | the next batch in the order of admission is finished | it | bound |
| `slack_edf` | of every deadline d so many are finished that the rest fits up to d | earliest deadlines | bound |
| `wait` | a batch is finished and nothing that runs has reached the bound | oldest first | 2 bound - 1 |
| | | or the order of arrival | 2 bound |
| `count` | a batch is finished | the order of arrival | none |
| `evict` | a batch is finished; what is older than the bound is dropped | the order of arrival | bound |

A rule counts groups; its state follows from the calls `add`, `born`, `finish`, `remove` alone. The usual question "not
yet?" costs O(versions outstanding), a decision that starts a step O(outstanding * log batch).
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import ClassVar

from rlflow.protocol.batches import BatchSizes
from rlflow.protocol.errors import ProtocolError
from rlflow.protocol.rule_names import RuleName as RuleName
from rlflow.protocol.trigger import Trigger
from rlflow.protocol.units import Decision, Unit


class Rule(ABC):
    """The outstanding groups (admitted, neither consumed nor rejected) and the question to ask of them."""

    name: ClassVar[RuleName]

    def __init__(self, trigger: Trigger, group: int = 1) -> None:
        self.trigger = trigger
        self.group = group
        self.units: dict[int, Unit] = {}
        """In the order of admission."""
        self.arrived: dict[int, Unit] = {}
        """The finished ones, in the order in which they finished."""

    def add(self, unit: Unit) -> None:
        """A group was admitted."""
        if unit.id in self.units or unit.finished:
            raise ProtocolError(f"group {unit.id} is already known or finished")
        if self.units and unit.id < next(reversed(self.units)):
            raise ProtocolError(f"group {unit.id} admitted out of order")
        self.units[unit.id] = unit

    def born(self, id: int, birth: int | None) -> None:
        """The oldest version of any token of the group is now `birth`."""
        self._known(id).birth = birth

    def finish(self, id: int) -> None:
        """All samples of the group are finished."""
        unit = self._known(id)
        if unit.finished:
            raise ProtocolError(f"group {id} finished twice")
        unit.finished = True
        self.arrived[id] = unit

    def remove(self, id: int) -> Unit:
        """The group was consumed, rejected or aborted."""
        unit = self._known(id)
        del self.units[id]
        self.arrived.pop(id, None)
        return unit

    def decide(self, step: int, batches: BatchSizes, *, closed: bool = False) -> Decision:
        """Whether step `step` may start now. `closed`: nothing more is admitted, so the last batch may be short."""
        batch = batches.at(step)
        most = batch // self.group
        least = min(self.trigger.least(batch, self.group) // self.group, len(self.units) if closed else most)
        if not least:
            return Decision(waits_for="the end: nothing is outstanding" if closed else "groups")
        return self._decide(step, least, most, batches)

    def early(self, step: int, room: int, batches: BatchSizes) -> tuple[int, ...]:
        """Finished groups that step `step`, with places for `room` groups left, may train on before the others.

        Taking them never keeps the step from meeting the rule once it has its whole batch.
        """
        raise ProtocolError(f"`{self.name}` cannot start a step before it knows its batch: take in_order or slack_edf")

    @abstractmethod
    def _decide(self, step: int, least: int, most: int, batches: BatchSizes) -> Decision:
        """`least` <= `most` groups; least is what is outstanding at most when the source is closed."""

    def _few(self, least: int) -> Decision:
        return Decision(waits_for=f"{least - len(self.arrived)} more finished groups of {least}")

    def _first(self, count: int, key: Callable[[Unit], tuple[int, ...]] | None) -> tuple[int, ...]:
        """The `count` first finished groups by key, or in the order of arrival."""
        if key is None:
            return tuple(islice(self.arrived, count))
        return tuple(unit.id for unit in heapq.nsmallest(count, self.arrived.values(), key=key))

    def _known(self, id: int) -> Unit:
        if id not in self.units:
            raise ProtocolError(f"group {id} is not outstanding")
        return self.units[id]


class InOrder(Rule):
    """Admission order. Age <= bound: group n trains at step ceil(n / batch) - 1, which the gate allowed for."""

    name = "in_order"

    def __init__(self, trigger: Trigger, group: int = 1) -> None:
        super().__init__(trigger, group)
        if trigger.carries:
            raise ValueError("a trigger with carry-over leaves the order of admission: use slack_edf")
        self._order: list[int] = []
        self._end = 0
        """Everything in `_order` before this index is finished or gone."""
        self._prefix = 0
        """Finished groups before `_end` that are still outstanding."""

    def add(self, unit: Unit) -> None:
        super().add(unit)
        self._order.append(unit.id)

    def finish(self, id: int) -> None:
        super().finish(id)
        self._advance()

    def remove(self, id: int) -> Unit:
        before = self._end == len(self._order) or id < self._order[self._end]
        unit = super().remove(id)
        self._prefix -= before
        self._advance()
        return unit

    def _advance(self) -> None:
        order = self._order
        while self._end < len(order):
            unit = self.units.get(order[self._end])
            if unit is not None and not unit.finished:
                break
            self._prefix += unit is not None
            self._end += 1
        if self._end > 64 and self._end > 2 * len(self.units):
            del order[: self._end]
            self._end = 0

    def _decide(self, step: int, least: int, most: int, batches: BatchSizes) -> Decision:
        if self._prefix < least:
            blocker = f"group {self._order[self._end]}" if self._end < len(self._order) else "the next group"
            return Decision(waits_for=f"{blocker}: {self._prefix} of the next {least} are finished before it")
        return Decision(tuple(islice(self.units, min(most, self._prefix))))

    def early(self, step: int, room: int, batches: BatchSizes) -> tuple[int, ...]:
        return tuple(unit.id for unit in islice(self.units.values(), room) if unit.finished)


class SlackEdf(Rule):
    """Earliest deadline first (Liu, Layland 1973), with the test that keeps it feasible.

    With Out(d) groups outstanding of deadline <= d and M_j taken at step j at the least, step i needs
    Out(d) - (M_{i+1} + ... + M_d) finished groups of deadline <= d, for every d >= i. Then Out(d) <= M_i + ... + M_d
    holds before every step, so no group outlives its deadline and no step needs more than M_i groups.
    """

    name = "slack_edf"

    def __init__(self, trigger: Trigger, group: int = 1) -> None:
        super().__init__(trigger, group)
        self._out: Counter[int] = Counter()
        """Outstanding groups by deadline."""
        self._done: dict[int, dict[int, None]] = {}
        """The finished ones of them, in the order of arrival."""

    def add(self, unit: Unit) -> None:
        super().add(unit)
        self._out[unit.deadline] += 1

    def finish(self, id: int) -> None:
        super().finish(id)
        self._done.setdefault(self.units[id].deadline, {})[id] = None

    def remove(self, id: int) -> Unit:
        unit = super().remove(id)
        self._out[unit.deadline] -= 1
        if unit.finished:
            del self._done[unit.deadline][id]
        if not self._out[unit.deadline]:
            del self._out[unit.deadline]
            self._done.pop(unit.deadline, None)
        return unit

    def _needs(self, step: int, batches: BatchSizes) -> Iterator[tuple[int, int, int]]:
        """(deadline d, groups of deadline <= d that this step must take, such groups finished), d rising."""
        out = done = 0
        for d in sorted(self._out):
            out += self._out[d]
            done += len(self._done.get(d, ()))
            later = batches.total(step + 1, d, lambda batch: self.trigger.least(batch, self.group)) // self.group
            yield d, out - later, done

    def _decide(self, step: int, least: int, most: int, batches: BatchSizes) -> Decision:
        if len(self.arrived) < least:
            return self._few(least)
        for d, need, done in self._needs(step, batches):
            # More than a batch is due only after the bound or the batch was lowered: those are late, not stuck.
            if done < min(need, most):
                return Decision(waits_for=f"{min(need, most) - done} more finished groups that are due by step {d}")
        return Decision(self._first(most, lambda unit: (unit.deadline, unit.id)))

    def early(self, step: int, room: int, batches: BatchSizes) -> tuple[int, ...]:
        """Earliest deadlines first, as long as the places left suffice for all that is due, finished or not."""
        chosen: list[int] = []
        # Places that nothing due by an earlier deadline d needs: min over those d of room - need - chosen after d.
        spare = room
        for d, need, _ in self._needs(step, batches):
            taken = list(islice(self._done.get(d, ()), max(0, min(spare, room - len(chosen)))))
            chosen += taken
            # Groups of later deadlines use up the spare places of all deadlines before; `need` counts those chosen too.
            spare = min(spare - len(taken), room - need)
        return tuple(chosen)


class Wait(Rule):
    """Waits while something that runs has reached the bound, then takes the oldest, or the first that arrived.

    Looking only at what runs out now is not enough: a cohort of more than a batch can reach the bound together.
    """

    name = "wait"

    def __init__(self, trigger: Trigger, group: int = 1, *, bound: int, oldest_first: bool = True) -> None:
        super().__init__(trigger, group)
        self.bound = bound
        self.oldest_first = oldest_first
        self._running: Counter[int] = Counter()

    def add(self, unit: Unit) -> None:
        super().add(unit)
        self._running[unit.version] += 1

    def finish(self, id: int) -> None:
        super().finish(id)
        self._gone(self.units[id])

    def remove(self, id: int) -> Unit:
        unit = super().remove(id)
        if not unit.finished:
            self._gone(unit)
        return unit

    def _gone(self, unit: Unit) -> None:
        self._running[unit.version] -= 1
        if not self._running[unit.version]:
            del self._running[unit.version]

    def _decide(self, step: int, least: int, most: int, batches: BatchSizes) -> Decision:
        if len(self.arrived) < least:
            return self._few(least)
        oldest = min(self._running, default=step)
        if self._running and step - oldest >= self.bound:
            return Decision(waits_for=f"{self._running[oldest]} running groups of version {oldest}")
        return Decision(self._first(most, (lambda unit: (unit.version, unit.id)) if self.oldest_first else None))


class Count(Rule):
    """First finished, first trained on. Bounds the number of samples ahead, not the age of any one."""

    name = "count"

    def _decide(self, step: int, least: int, most: int, batches: BatchSizes) -> Decision:
        return Decision(self._first(most, None)) if len(self.arrived) >= least else self._few(least)

    def early(self, step: int, room: int, batches: BatchSizes) -> tuple[int, ...]:
        return self._first(room, None)
