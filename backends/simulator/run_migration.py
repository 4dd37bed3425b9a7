"""Migration at the end of a batch: the last samples move to few engines, and the others do what comes next.

As in RLHFuse (NSDI 2025): when few samples of a batch are left, those that run gather on as few engines as their number
and the cache allow; the devices that become free compute log-probs and values of the groups that are finished. A sample
that moves has its context computed again. Which samples move, and when, follows from the numbers here alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.diagnostics import RunFailure, did_you_mean
from rlflow.ir.flow import STEP
from rlflow.ir.ops import Generate, Logprobs, ModelScore, Score, Values
from rlflow.plan import Plan, Stage
from rlflow.plan_decisions import EngineEstimate


@dataclass(frozen=True, slots=True)
class Migration:
    """Of one generate stage. `share` of the batch: at most so many samples are left when they move."""

    share: float

    def due(self, left: int, batch: int) -> bool:
        """Whether so few samples of a batch run that they are gathered."""
        return 0 < left <= self.share * batch


def engines_needed(facts: EngineEstimate, left: int) -> int:
    """Engines (those in lock step are one) that hold so many samples at their full length.

    M >= max(R / slots, R (prompt + max_new) / cache) for R samples: the condition of RLHFuse (arXiv 2409.13221).
    """
    slots, cache = facts.slots * facts.lock_step, facts.kv_tokens * facts.lock_step
    return max(1, -(-left // slots), -(-left * (facts.prompt_tokens + facts.max_new) // cache))


def kept(loads: Sequence[int], facts: EngineEstimate) -> tuple[int, ...] | None:
    """The engines that the rest of the samples gathers on: those with the most of them. None: as many as now."""
    active = sum(load > 0 for load in loads)
    needed = engines_needed(facts, sum(loads))
    if needed >= active:
        return None
    return tuple(sorted(sorted(range(len(loads)), key=lambda number: (-loads[number], number))[:needed]))


def begins_early(stage: Stage) -> bool:
    """Whether a stage may compute the finished groups while the rest is generated: it looks at rows one by one. Python
    functions are asked once the rest is there, without holding up the list."""
    return isinstance(stage.op, Logprobs | Values | ModelScore | Score) and stage.phase == STEP


def migrations_of(plan: Plan, shares: Mapping[str, float]) -> dict[str, Migration]:
    """RunFailure RLF1001 for a name that is no generate stage of the step, RLF4003 for one whose engines get samples of
    the next batch anyway, or that has a single engine."""
    stages = {s.id: s for s in plan.stages if isinstance(s.op, Generate) and s.phase == STEP}
    engines = {estimate.stage: estimate.engine for estimate in plan.estimates}
    ahead = {reader.stage for channel in plan.channels for reader in channel.stale}
    found = {}
    for name, share in shares.items():
        if name not in stages:
            guess = did_you_mean(name, list(stages))
            helps = (
                f"did you mean `{guess}`?" if guess else f"such stages are {', '.join(stages) or 'not in this plan'}"
            )
            raise RunFailure("RLF1001", f"`--migrate {name}=...`: no stage `{name}` generates", help=(helps,))
        if name in ahead:
            raise RunFailure(
                "RLF4003",
                f"`--migrate {name}=...`: the engines of `{name}` go on with samples of the next batch",
                stage=name,
                help=("migration is for stages without a `staleness` or `trigger` line",),
            )
        facts = engines.get(name)
        count = 1 if facts is None else max(1, facts.replicas // facts.lock_step)
        if facts is not None and count == 1:
            what = f"{facts.replicas} replicas in lock step" if facts.replicas > 1 else "one replica"
            raise RunFailure(
                "RLF4003",
                f"`--migrate {name}=...`: `{name}` has one engine ({what}), so that no sample can move",
                stage=name,
                help=("place it with a smaller layout, which gives more replicas",),
            )
        found[name] = Migration(share)
    return found
