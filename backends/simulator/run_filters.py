"""Filters that drop groups and sample further prompts: how many rounds a step takes.

Whether a prompt's group is kept depends on the seed, the stage and the number of the prompt, and on nothing else: plans
that are compared drop the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlflow.cost.draws import chance
from rlflow.diagnostics import RunFailure, did_you_mean
from rlflow.ir.ops import Generate, MixedGroups, Take
from rlflow.plan import Plan, Stage


@dataclass(slots=True, eq=False)
class Filter:
    """One `mixed_groups` stage of the step."""

    stage: Stage
    prompts: int
    """Of a round, and as many groups are wanted."""
    refill: int
    """Further rounds at most."""
    share: float
    """Of the groups that are kept, on average."""
    seed: int
    above: frozenset[str]
    """Stages that run again in a further round."""
    rounds: dict[int, int] = field(default_factory=dict)
    """Step to its rounds."""
    short: set[int] = field(default_factory=set)
    """Steps that have fewer groups than wanted after the last round."""
    _kept: dict[int, int] = field(default_factory=dict)
    _next: int = 0

    def further(self, step: int) -> bool:
        """After a round: whether another follows."""
        kept = self._kept.get(step, 0)
        for prompt in range(self._next, self._next + self.prompts):
            kept += chance(self.seed, self.stage.id, prompt) < self.share
        self._next += self.prompts
        self._kept[step] = kept
        self.rounds[step] = self.rounds.get(step, 0) + 1
        if kept >= self.prompts:
            return False
        if self.rounds[step] > self.refill:
            self.short.add(step)
            return False
        return True


def filters_of(plan: Plan, shares: Mapping[str, float], seed: int) -> dict[str, Filter]:
    """RunFailure RLF1001 for a name that is no such stage, RLF4003 where its samples come from another pool."""
    stages = {stage.id: stage for stage in plan.stages}
    names = [stage.id for stage in plan.stages if isinstance(stage.op, MixedGroups)]
    found = {}
    for name, share in shares.items():
        if name not in names:
            guess = did_you_mean(name, names)
            helps = f"did you mean `{guess}`?" if guess else f"such stages are {', '.join(names) or 'not in this plan'}"
            raise RunFailure("RLF1001", f"`--keep {name}=...`: no stage `{name}` drops groups", help=(helps,))
        stage = stages[name]
        assert isinstance(stage.op, MixedGroups)
        above, stack = set[str](), list(stage.inputs.values())
        while stack:
            above.add(id := stack.pop())
            stack += stages[id].inputs.values()
        apart = [id for id in above if isinstance(stages[id].op, Generate) and stages[id].pool != stage.pool]
        if apart:
            raise RunFailure(
                "RLF4003",
                f"further rounds of `{name}` are simulated where `{apart[0]}` runs on the same pool",
                notes=(f"`{name}` is on pool `{stage.pool}`, `{apart[0]}` on pool `{stages[apart[0]].pool}`",),
                help=("leave `--keep` out, or place both on one pool",),
            )
        takes = [op.count for id in above if isinstance(op := stages[id].op, Take)]
        if takes and takes[0] is not None:
            found[name] = Filter(stage, takes[0], stage.op.refill, share, seed, frozenset(above))
    return found
