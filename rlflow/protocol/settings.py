"""How one edge admits and consumes: what the schedule says, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rlflow.protocol.rule_names import RuleName
from rlflow.protocol.trigger import Trigger


@dataclass(frozen=True, slots=True)
class Settings:
    """Rule, bound and sizes at the start of a run."""

    rule: RuleName
    bound: int
    """Staleness that the schedule uses, in steps (eta, or s)."""
    batch: int
    """Samples of a step."""
    group: int = 1
    burst: int = 1
    """Admit at versions that are multiples of this."""
    trigger: Trigger = Trigger()  # noqa: RUF009 - a frozen value
    oldest_first: bool | None = None
    """For `wait` (default true) and `evict` (default false)."""

    def to_json(self) -> dict[str, Any]:
        share = self.trigger.share
        return {
            "rule": self.rule,
            "bound": self.bound,
            "batch": self.batch,
            "group": self.group,
            "burst": self.burst,
            "trigger": {
                "share": [share.numerator, share.denominator],
                "carry": self.trigger.carry,
                "same_batch": self.trigger.same_batch,
            },
            "oldest_first": self.oldest_first,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Settings:
        trigger = data["trigger"]
        return cls(**{**data, "trigger": Trigger(**{**trigger, "share": Fraction(*trigger["share"])})})
