"""K of N: how much of a batch must be finished before its step starts, and what becomes of the rest."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Literal

from rlflow.protocol.batches import BatchSizes
from rlflow.values import dataclass

Carry = Literal["partial", "finish"]


@dataclass(frozen=True, slots=True)
class Trigger:
    """Step i starts when `share` of its batch is finished and takes up to the whole batch.

    Below 1 the rest carries over to later steps, which is staleness (`rlflow.protocol.guarantees.carry_age`): `partial`
    interrupts it at the next publication and resumes it first, with its version segments; `finish` lets it run on with
    the weights it has. `same_batch` starts early too, but trains on all of the batch before publishing: that overlaps
    generation and training and changes no age.
    """

    share: Fraction = Fraction(1)
    carry: Carry = "partial"
    same_batch: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.share, Fraction):
            raise TypeError(f"the share {self.share!r} must be a Fraction: floats round (see `Trigger.percent`)")
        if not 0 < self.share <= 1:
            raise ValueError(f"a trigger at {float(self.share):%} must be above 0 % and at most 100 %")
        if self.carry not in ("partial", "finish"):
            raise ValueError(f"carry {self.carry!r}: `partial` or `finish`")

    @classmethod
    def percent(cls, percent: int | float | str | Fraction, carry: Carry = "partial") -> Trigger:
        """Of the decimal number as written: 0.1 is one tenth of a percent, not the binary number next to it."""
        exact = percent if isinstance(percent, Fraction) else Fraction(Decimal(str(percent)))
        return cls(exact / 100, carry)

    @property
    def carries(self) -> bool:
        """Whether a step may leave samples of its batch to later steps."""
        return self.share < 1 and not self.same_batch

    def start(self, batch: int, group: int = 1) -> int:
        """Finished samples at which the step may start: ceil(share * batch), rounded up to whole groups."""
        groups = batch // group
        return -(-groups * self.share.numerator // self.share.denominator) * group

    def least(self, batch: int, group: int = 1) -> int:
        """Samples that the step trains on at least (M)."""
        return self.start(batch, group) if self.carries else batch

    def deadline(self, version: int, bound: int, batches: BatchSizes, group: int = 1) -> int:
        """The last step at which a sample admitted at `version` may be trained.

        The first step d with M_version + ... + M_d >= the window of bound + 1 batches: for constant batches
        version + ceil((bound + 1) * batch / M) - 1, without carry-over version + bound.
        """
        if not self.carries:
            return version + bound
        window = batches.total(version, version + bound)
        d = version + bound
        while batches.total(version, d, lambda batch: self.least(batch, group)) < window:
            d += 1
        return d
