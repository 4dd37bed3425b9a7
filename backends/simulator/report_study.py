"""Several simulations of one plan, with other lengths each: means, and how sure they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from rlflow.backends.simulator.failures import Forecast
from rlflow.backends.simulator.report import Result

_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom; 1.96 beyond."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Of several seeds. `half`: half the width of the 95 % confidence interval (Student 1908); None for one value."""

    value: float
    half: float | None

    @property
    def interval(self) -> list[float] | None:
        """[low, high]"""
        return None if self.half is None else [self.value - self.half, self.value + self.half]

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Raises ValueError for no values."""
        if not values:
            raise ValueError("no values have no mean")
        freedom = len(values) - 1
        if not freedom:
            return cls(values[0], None)
        quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96
        return cls(fmean(values), quantile * stdev(values) / sqrt(len(values)))


@dataclass(frozen=True, slots=True)
class Study:
    """Results of one plan."""

    results: tuple[Result, ...]
    """At least one."""
    sampled: bool
    """Whether lengths were drawn; else every stage took the time of its estimate."""
    failing: Forecast | None = None
    """What failures of hosts would make of it, if that was asked."""

    def __post_init__(self) -> None:
        if not self.results:
            raise ValueError("a study has at least one result")

    @property
    def first(self) -> Result:
        return self.results[0]

    def mean(self, of: Callable[[Result], float]) -> Mean:
        return Mean.of([float(of(result)) for result in self.results])

    @property
    def ages(self) -> Mapping[str, Mapping[int, int]]:
        """Generate stage to the number of samples by age, of all seeds together."""
        found: dict[str, dict[int, int]] = {}
        for result in self.results:
            for stage, ages in result.ages.items():
                counts = found.setdefault(stage, {})
                for age, count in ages.items():
                    counts[age] = counts.get(age, 0) + count
        return {stage: dict(sorted(counts.items())) for stage, counts in found.items()}

    def to_json(self) -> dict[str, Any]:
        """Seconds, shares, bytes and steps; an interval is [low, high] or null."""
        first, period = self.first, self.mean(lambda r: float(r.period) / 1e6)
        tokens = self.mean(lambda r: r.tokens_per_second)
        return {
            "seeds": len(self.results) if self.sampled else 0,
            "steps": len(first.ends) - first.warm_up,
            "step_s": period.value,
            "step_s_interval": period.interval,
            "tokens_per_s": tokens.value if first.tokens_per_step else None,
            "tokens_per_s_interval": tokens.interval if first.tokens_per_step else None,
            "tokens_are": "drawn" if first.tokens_drawn else "assumed",
            "bubble": self.mean(lambda r: r.bubble).value,
            "pools": {
                name: {
                    "devices": pool.devices,
                    "busy": self.mean(lambda r, name=name: r.pools[name].busy).value,  # type: ignore[misc]
                    "moving": self.mean(lambda r, name=name: r.pools[name].moving).value,  # type: ignore[misc]
                }
                for name, pool in first.pools.items()
            },
            "ages": {
                stage: {
                    "samples": {str(age): count for age, count in ages.items()},
                    "worst": max(ages, default=0),
                    "promised": first.promised[stage],
                }
                for stage, ages in self.ages.items()
            },
            "moved_samples_per_step": {
                stage: self.mean(lambda r, stage=stage: r.moved[stage]).value  # type: ignore[misc]
                for stage in first.moved
            },
            "thrown_out": {
                stage: {
                    "samples_per_step": self.mean(lambda r, stage=stage: r.thrown_out[stage].samples).value,  # type: ignore[misc]
                    "tokens_per_step": self.mean(lambda r, stage=stage: r.thrown_out[stage].tokens).value,  # type: ignore[misc]
                }
                for stage in first.thrown_out
            },
            "failed_calls": {
                stage: {
                    what: self.mean(lambda r, stage=stage, what=what: getattr(r.failed_calls[stage], what)).value  # type: ignore[misc]
                    for what in ("tries", "lost", "stops")
                }
                for stage in first.failed_calls
            },
            "refills": {
                stage: {
                    "rounds": self.mean(lambda r, stage=stage: r.refills[stage].rounds).value,  # type: ignore[misc]
                    "most": max(r.refills[stage].most for r in self.results),
                    "short": self.mean(lambda r, stage=stage: r.refills[stage].short).value,  # type: ignore[misc]
                }
                for stage in first.refills
            },
            "queues": {
                name: {
                    "capacity": queue.capacity,
                    "most": max(r.queues[name].most for r in self.results),
                    "mean": self.mean(lambda r, name=name: r.queues[name].mean).value,  # type: ignore[misc]
                }
                for name, queue in first.queues.items()
            },
            "links": {name: {"bytes_per_step": link.bytes, "busy": link.busy} for name, link in first.links.items()},
            "memory": {pool: {"peak": peak, "capacity": room} for pool, (peak, room) in first.peak_bytes.items()},
            "not_counted": list(first.uncounted),
        } | ({} if self.failing is None else {"failures": self.failing.to_json()})
