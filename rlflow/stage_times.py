"""How long instructions take: the plan's estimates, what the user states, or what a caller draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from rlflow.diagnostics import RunFailure, did_you_mean
from rlflow.ir.flow import STEP, reads_model
from rlflow.plan import Plan, ReshardWeights, RunStage, Stage

Time = int | float | Fraction
"""Microseconds."""
CHECKPOINT = "checkpoint"
Draw = Callable[[str, int, Time], Time]
"""(stage or `reshard MODEL`, step, microseconds by the plan) to the microseconds of this time."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Microseconds of every stage, `reshard MODEL` and `checkpoint`. What is not listed takes no time."""

    us: Mapping[str, Time]
    draw: Draw | None = None

    def of(self, name: str, step: int, known: Time = 0) -> Time:
        """Of a stage in a step; `known` is what the plan says where nobody stated a time."""
        base = self.us.get(name, known)
        return base if self.draw is None else self.draw(name, step, base)


def durations_of(
    plan: Plan, stated: Mapping[str, float], *, phases: tuple[str, ...] = (STEP,), draw: Draw | None = None
) -> Durations:
    """`stated`: name to seconds, before the plan's estimates.

    RunFailure RLF4004 where the time of a model stage is neither estimated nor stated, RLF1001 for a name that is no
    stage.
    """
    names = [stage.id for stage in plan.stages if stage.phase in phases]
    others = [*(f"reshard {model}" for model in _resharded(plan)), CHECKPOINT]
    for name in stated:
        if name not in names and name not in others:
            guess = did_you_mean(name, [*names, *others])
            raise RunFailure(
                "RLF1001",
                f"`--stage {name}=...`: the plan has no stage `{name}`",
                help=(f"did you mean `{guess}`?" if guess else f"stages are {', '.join([*names, *others])}",),
            )
    us: dict[str, Time] = {estimate.stage: estimate.us for estimate in plan.estimates}
    us.update((name, round(seconds * 1_000_000)) for name, seconds in stated.items())
    unknown = [stage for stage in plan.stages if stage.id in _run(plan, phases) and needs_estimate(stage)]
    unknown = [stage for stage in unknown if stage.id not in us]
    if unknown:
        raise RunFailure(
            "RLF4004",
            f"how long {_listed([f'`{stage.id}`' for stage in unknown])} take{'s' * (len(unknown) == 1)} is not known",
            notes=tuple(dict.fromkeys(_why(plan, stage) for stage in unknown)),
            help=("state it: " + " ".join(f"`--stage {stage.id}=SECONDS`" for stage in unknown[:4]),),
        )
    return Durations(us, draw)


def needs_estimate(stage: Stage) -> bool:
    """Whether a stage runs a model, so that leaving its time out would be wrong."""
    return reads_model(stage.op) is not None


def uncounted(plan: Plan, durations: Durations) -> list[str]:
    """Python stages that are simulated as if they took no time."""
    return [
        stage.id
        for stage in plan.stages
        if stage.op.kind == "score" and stage.phase == STEP and stage.id not in durations.us
    ]


def _run(plan: Plan, phases: tuple[str, ...]) -> set[str]:
    return {
        instruction.stage
        for program in plan.programs
        for name, listed in [(STEP, program.step), *((e.name, e.instructions) for e in program.evaluations)]
        if name in phases
        for instruction in listed
        if isinstance(instruction, RunStage)
    }


def _resharded(plan: Plan) -> list[str]:
    found = [i.model for program in plan.programs for i in program.step if isinstance(i, ReshardWeights)]
    return list(dict.fromkeys(found))


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _why(plan: Plan, stage: Stage) -> str:
    pool = next(pool for pool in plan.pools if pool.name == stage.pool)
    if pool.device == "cpu":
        return f"the speed of the CPUs of `{pool.name}` is measured, not stated"
    model = reads_model(stage.op)
    return (
        f"when the plan was compiled, the architecture of `{model}`, a fact about the devices of `{pool.name}` or the "
        f"number of rows of `{stage.id}` was not known"
    )
