"""From what a plan says about a stale reader to the protocol's settings; simulator and runtime both ask here."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal, Protocol

from rlflow.protocol.rule_names import RuleName
from rlflow.protocol.settings import Settings
from rlflow.protocol.trigger import Trigger


class StaleReading(Protocol):
    """As `rlflow.plan.StaleReader` has it."""

    @property
    def steps(self) -> int: ...
    @property
    def admit(self) -> RuleName: ...
    @property
    def burst(self) -> int: ...
    @property
    def trigger(self) -> float: ...
    @property
    def carry(self) -> Literal["partial", "finish", "nothing"]: ...


def is_stream(stale: StaleReading) -> bool:
    """Whether more is asked for than whole batches, one after another."""
    return stale.trigger != 1.0 or stale.admit != "in_order" or stale.burst != 1


def drains(settings: Settings) -> bool:
    """Whether new weights wait for the samples that are under way. Otherwise these go on with the new ones.

    `carry finish` says so. In order without a trigger every sample is made by one version, too.
    """
    trigger = settings.trigger
    return trigger.carry == "finish" and (trigger.carries or settings.rule == "in_order")


def settings_of(stale: StaleReading | None, batch: int, group: int) -> Settings:
    """How the edge admits and consumes; without staleness in order, one batch at a time. `batch`, `group`: samples."""
    if stale is None:
        return Settings("in_order", 0, batch, group)
    share = Fraction(repr(round(stale.trigger, 9)))  # as written: 70% is not the binary number next to 0.7
    trigger = Trigger(share, "partial" if stale.carry == "partial" else "finish", stale.carry == "nothing")
    return Settings(stale.admit, stale.steps, batch, group, stale.burst, trigger)
