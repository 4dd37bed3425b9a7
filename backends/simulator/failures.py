"""What failing hosts cost: a run that is resumed from its last checkpoint, over and over.

Hosts fail independently and at random, with exponential times between. A failure ends the run, wherever it happens;
what was trained since the last checkpoint is lost, and the resumed run begins with empty queues and engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, expm1, inf
from statistics import fmean
from typing import Any

from rlflow.backends.simulator.report import Result
from rlflow.plan import Plan, SaveCheckpoint

_LONGEST = 300.0
"""Exponents beyond this are as good as never: no run gets through."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Seconds."""

    mtbf_s: float
    """Mean time between failures of one host, above 0."""
    restart_s: float
    """From a failure to the first instruction of the resumed run."""

    def __post_init__(self) -> None:
        if not 0 < self.mtbf_s < inf or not 0 <= self.restart_s < inf:
            raise ValueError(f"{self}: a time between failures above 0, and a restart of at least 0 seconds")


@dataclass(frozen=True, slots=True)
class Run:
    """A run without failures, in seconds."""

    step_s: float
    """Of a step in the long run, checkpoints left out."""
    checkpoint_s: float
    """That is waited for."""
    cold_s: float
    """What the first steps take more than that, until the plan is in its rhythm: paid after every failure."""
    per_s: float
    """Failures of all hosts, a second."""
    restart_s: float

    def segment(self, steps: int) -> float:
        """Mean seconds from one checkpoint to the next, failures included.

        (exp(rate w) - 1)/rate seconds until w pass without a failure, times exp(rate r) where every attempt but the
        first begins with r seconds that may fail too (Daly 2006): the restart, and the cold start.
        """
        work = steps * self.step_s + self.checkpoint_s
        again = self.restart_s + self.cold_s
        if self.per_s * (work + again) > _LONGEST:
            return inf
        return exp(self.per_s * again) * expm1(self.per_s * work) / self.per_s

    def mean_step(self, every: int) -> float:
        return self.segment(every) / every

    def best(self) -> int:
        """Steps between checkpoints with the least mean step. Segments are convex in their length, so the mean falls up
        to it and rises after it."""
        low, high = 1, 2
        while self.mean_step(high) < self.mean_step(high - 1) and high < 1 << 40:
            low, high = high, high * 2
        while low < high:
            middle = (low + high) // 2
            if self.mean_step(middle + 1) < self.mean_step(middle):
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(frozen=True, slots=True)
class Forecast:
    """A plan on hosts that fail. `lost`: share of the time in which nothing that lasts is done."""

    hosts: int
    failures: Failures
    between_s: float
    """Mean seconds from one failure of any host to the next."""
    every: int | None
    """Steps between checkpoints by the plan; None: only at the end of a run whose length is not known."""
    step_s: float | None
    """Mean, with failures; None: not known; infinite: no segment gets through."""
    lost: float | None
    best_every: int
    best_lost: float
    checkpoint_s: float

    def to_json(self) -> dict[str, Any]:
        return {
            "hosts": self.hosts,
            "mtbf_of_a_host_s": self.failures.mtbf_s,
            "restart_s": self.failures.restart_s,
            "between_failures_s": self.between_s,
            "checkpoint_every": self.every,
            "checkpoint_s": self.checkpoint_s,
            "step_s": None if self.step_s == inf else self.step_s,
            "lost": self.lost,
            "best_checkpoint_every": self.best_every,
            "best_lost": self.best_lost,
        }


def forecast(
    plan: Plan, results: Sequence[Result], bare: Sequence[Result], failures: Failures, checkpoint_s: float
) -> Forecast:
    """For the mean run of some simulations. `bare`: the same with checkpoints that take no time, `checkpoint_s` what
    they do take in `results`, of which a part may run beside other pools."""
    hosts = len({rank.host for pool in plan.pools for rank in pool.ranks})
    saves = [i.every for program in plan.programs for i in program.step if isinstance(i, SaveCheckpoint) and i.every]
    every = min(saves, default=plan.stop.steps)
    steps = [float(result.period) / 1e6 for result in bare]
    colds = [
        max(0.0, float(result.ends[-1]) / 1e6 - step * len(result.ends))
        for result, step in zip(bare, steps, strict=True)
    ]
    measured = range(results[0].warm_up, len(results[0].ends))
    written = sum((step + 1) % saves[0] == 0 for step in measured) if saves else 0
    waited = checkpoint_s
    if written:
        more = fmean(float(result.period) / 1e6 for result in results) - fmean(steps)
        waited = min(checkpoint_s, max(0.0, more * len(measured) / written))
    run = Run(fmean(steps), waited, fmean(colds), hosts / failures.mtbf_s, failures.restart_s)
    best = run.best()
    mean = None if every is None else run.mean_step(every)
    return Forecast(
        hosts,
        failures,
        1 / run.per_s,
        every,
        mean,
        None if mean is None else 1 - run.step_s / mean,
        best,
        1 - run.step_s / run.mean_step(best),
        checkpoint_s,
    )
