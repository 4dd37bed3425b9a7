"""Counts of what became of samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.protocol.samples import Phase, Sample


@dataclass(slots=True)
class Tally:
    """Every admitted sample is outstanding or counted here once: consumed, rejected or aborted."""

    admitted: int = 0
    consumed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """By reason."""
    aborted: Counter[str] = field(default_factory=Counter)
    """By reason."""
    trained_tokens: int = 0
    wasted_tokens: int = 0
    """Of rejected and aborted samples, and of attempts thrown away by a retry."""
    ages: Counter[int] = field(default_factory=Counter)
    """Consumed samples by age."""

    def add(self, sample: Sample) -> None:
        """A sample has reached its last phase."""
        match sample.phase:
            case Phase.CONSUMED:
                self.consumed += 1
                self.trained_tokens += sample.tokens
                self.ages[sample.age(sample.step or 0)] += 1
            case Phase.REJECTED | Phase.ABORTED:
                (self.rejected if sample.phase is Phase.REJECTED else self.aborted)[sample.reason] += 1
                self.wasted_tokens += sample.tokens
            case _:
                raise ValueError(f"sample {sample.id} is {sample.phase}: it has not ended")

    def to_json(self) -> dict[str, Any]:
        return {
            "admitted": self.admitted,
            "consumed": self.consumed,
            "rejected": dict(sorted(self.rejected.items())),
            "aborted": dict(sorted(self.aborted.items())),
            "trained_tokens": self.trained_tokens,
            "wasted_tokens": self.wasted_tokens,
            "ages": {str(age): count for age, count in sorted(self.ages.items())},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tally:
        ages = Counter({int(age): count for age, count in data["ages"].items()})
        counts = {"rejected": Counter(data["rejected"]), "aborted": Counter(data["aborted"]), "ages": ages}
        return cls(**{**data, **counts})
