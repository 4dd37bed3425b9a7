"""Samples of several turns: how much of a response each turn makes, and how long the environment takes between them.

A response is made in as many turns as the stage allows, of equal lengths. What the environment takes is exponential, by
the seed, the stage, the prompt, the sample and the turn alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

from rlflow.backends.simulator.clock import Time
from rlflow.cost.draws import chance
from rlflow.diagnostics import RunFailure, did_you_mean
from rlflow.ir.ops import Generate
from rlflow.plan import Plan


@dataclass(frozen=True, slots=True)
class Turns:
    """Of one generate stage."""

    stage: str
    count: int
    """Of a response."""
    mean_us: float
    """Of the environment, between two turns."""
    seed: int

    def end(self, length: int, turn: int) -> int:
        """Tokens of a response of this length after so many of its turns, the first of which is 1."""
        return length if turn >= self.count else max(1, length * turn // self.count)

    def wait(self, prompt: int, sample: int, turn: int) -> Time:
        """Microseconds after a turn."""
        return -self.mean_us * log(chance(self.seed, f"{self.stage}/{sample}/{turn}", prompt))

    @property
    def block_us(self) -> Time:
        """What the turns add where the stage is one block of time."""
        return round((self.count - 1) * self.mean_us)


def turns_of(plan: Plan, seconds: Mapping[str, float], seed: int) -> dict[str, Turns]:
    """RunFailure RLF1001 for a name that is no such stage."""
    stages = {s.id: s.op for s in plan.stages if isinstance(s.op, Generate) and s.op.environment is not None}
    found = {}
    for name, mean in seconds.items():
        op = stages.get(name)
        if op is None:
            guess = did_you_mean(name, list(stages))
            helps = (
                f"did you mean `{guess}`?" if guess else f"such stages are {', '.join(stages) or 'not in this plan'}"
            )
            raise RunFailure("RLF1001", f"`--turn {name}=...`: no stage `{name}` has an environment", help=(helps,))
        found[name] = Turns(name, op.turns, mean * 1e6, seed)
    return found
