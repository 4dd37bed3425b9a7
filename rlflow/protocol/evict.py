"""The rule that drops what is too old, and the choice of a rule by name."""

from __future__ import annotations

from collections import Counter

from rlflow.protocol.batches import BatchSizes
from rlflow.protocol.rule_names import RuleName, check_trigger
from rlflow.protocol.rules import Count, InOrder, Rule, SlackEdf, Wait
from rlflow.protocol.trigger import Trigger
from rlflow.protocol.units import Decision, Unit


class Evict(Rule):
    """Gives up groups older than the bound, queued or running; takes the first that arrived, or the oldest.

    What has no token yet is not old: it will be made by the version that is current then. Live, because only training
    makes versions, and versions make groups old: a trainer that waits makes nothing expire.
    """

    name = "evict"

    def __init__(self, trigger: Trigger, group: int = 1, *, bound: int, oldest_first: bool = False) -> None:
        super().__init__(trigger, group)
        self.bound = bound
        self.oldest_first = oldest_first
        self._births: Counter[int] = Counter()

    def add(self, unit: Unit) -> None:
        super().add(unit)
        self._count(unit.birth, 1)

    def born(self, id: int, birth: int | None) -> None:
        self._count(self._known(id).birth, -1)
        super().born(id, birth)
        self._count(birth, 1)

    def remove(self, id: int) -> Unit:
        unit = super().remove(id)
        self._count(unit.birth, -1)
        return unit

    def _count(self, birth: int | None, by: int) -> None:
        if birth is not None:
            self._births[birth] += by
            if not self._births[birth]:
                del self._births[birth]

    def expired(self, step: int) -> tuple[int, ...]:
        """Groups that would be older than the bound at step `step`, in the order of admission."""
        if not self._births or step - min(self._births) <= self.bound:
            return ()
        return tuple(u.id for u in self.units.values() if u.birth is not None and step - u.birth > self.bound)

    def decide(self, step: int, batches: BatchSizes, *, closed: bool = False) -> Decision:
        """First what is to be dropped: the question is to be asked again without it."""
        drop = self.expired(step)
        return (
            Decision(drop=drop, waits_for="groups that are too old to go")
            if drop
            else super().decide(step, batches, closed=closed)
        )

    def _decide(self, step: int, least: int, most: int, batches: BatchSizes) -> Decision:
        if len(self.arrived) < least:
            return self._few(least)
        return Decision(self._first(most, (lambda unit: (unit.birth or 0, unit.id)) if self.oldest_first else None))


def make_rule(
    name: RuleName, *, trigger: Trigger, bound: int, group: int = 1, oldest_first: bool | None = None
) -> Rule:
    """The rule of that name. Raises ValueError for an unknown name, or a trigger that the rule cannot have.

    `in_order` with a trigger that carries over becomes `slack_edf`: what is carried has left the order. `oldest_first`
    is for `wait` (default true) and `evict` (default false: order of arrival).
    """
    check_trigger(name, trigger)
    match name:
        case "in_order":
            return SlackEdf(trigger, group) if trigger.carries else InOrder(trigger, group)
        case "slack_edf":
            return SlackEdf(trigger, group)
        case "wait":
            return Wait(trigger, group, bound=bound, oldest_first=oldest_first is not False)
        case "count":
            return Count(trigger, group)
        case "evict":
            return Evict(trigger, group, bound=bound, oldest_first=oldest_first is True)
    raise ValueError(f"no rule `{name}`: in_order, slack_edf, wait, evict, count")
