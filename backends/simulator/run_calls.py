"""Calls of Python rewards that fail, and the rule for it: retries, and samples that are given up.

Whether a try fails depends on the seed, the stage, the sample and the number of the try, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from rlflow.cost.draws import chance
from rlflow.diagnostics import RunFailure, did_you_mean
from rlflow.ir.ops import Score
from rlflow.plan import Plan
from rlflow.stage_rows import rows_of


@dataclass(slots=True, eq=False)
class Calls:
    """Of one reward stage, a call a sample."""

    stage: str
    rows: int
    """Of a step."""
    workers: int
    retries: int
    drops: bool
    """A sample whose last try fails is left out; else the run stops."""
    share: float
    """Of the tries that fail."""
    seed: int
    tries: dict[int, int] = field(default_factory=dict)
    """Step to all tries."""
    lost: dict[int, int] = field(default_factory=dict)
    """Step to the samples without a score."""

    def stretch(self, step: int) -> float:
        """The time of a step's calls over that without failures: every worker takes the next sample when it is free."""
        free = [0] * min(self.workers, self.rows)
        heapify(free)
        tries = lost = 0
        for row in range(step * self.rows, (step + 1) * self.rows):
            needed = 1
            while chance(self.seed, f"{self.stage}/{needed}", row) < self.share:
                if needed > self.retries:
                    lost += 1
                    break
                needed += 1
            tries += needed
            heapreplace(free, free[0] + needed)
        self.tries[step], self.lost[step] = tries, lost
        return max(free) / -(-self.rows // self.workers)


def calls_of(plan: Plan, shares: Mapping[str, float], seed: int) -> dict[str, Calls]:
    """RunFailure RLF1001 for a name that is no reward stage of the step."""
    stages = {stage.id: stage for stage in plan.stages if isinstance(stage.op, Score)}
    sources = {reward.name: reward.source for reward in plan.rewards}
    workers = {pool.name: len(pool.ranks) for pool in plan.pools}
    found = {}
    for name, share in shares.items():
        stage = stages.get(name)
        if stage is None:
            guess = did_you_mean(name, list(stages))
            helps = (
                f"did you mean `{guess}`?" if guess else f"such stages are {', '.join(stages) or 'not in this plan'}"
            )
            raise RunFailure("RLF1001", f"`--fail {name}=...`: no stage `{name}` calls a function", help=(helps,))
        assert isinstance(stage.op, Score)
        source = sources[stage.op.reward]
        retries, rule = getattr(source, "retries", 0), getattr(source, "on_error", "fail")
        found[name] = Calls(name, rows_of(stage)[0], workers[stage.pool], retries, rule == "drop", share, seed)
    return found
