"""What a virtual run is told, and what follows from it and the plan: durations, bytes, what cannot be slept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.backends.ray_runtime.virtual.clock import overshoot
from rlflow.cost.assumed_lengths import assumed_lengths, stated_lengths
from rlflow.cost.lengths import Lengths, mean
from rlflow.diagnostics.diagnostic import Diagnostic, RunFailure, Severity
from rlflow.ir.flow import STEP
from rlflow.ir.ops import Generate
from rlflow.plan import MoveObject, Plan, Program, ReshardWeights, RunStage, Stage, WaitStage
from rlflow.plan_decisions import EngineEstimate
from rlflow.stage_rows import rows_of
from rlflow.stage_times import Durations, durations_of

STEPS = 10
"""Of a run whose flow counts epochs: how many rows the data have is not looked up."""
STEP_SECONDS = 2.0
"""What a step takes of this machine's time where no speed-up is given."""
TOKEN_BYTES = 12
"""Of a response token in a row: its id (int64) and its log-probability (float32)."""
_RESOLVED = 10
"""A sleep of less than so many times what the machine oversleeps is off by more than a tenth."""


@dataclass(frozen=True)
class VirtualSettings:
    """`speed_up` None: such that a step takes about two seconds, be the plan's longer or shorter."""

    speed_up: float | None = None
    workers: int = 16
    """At most, over all pools, where `ranks_per_worker` does not say."""
    ranks_per_worker: int | None = None
    """Rounded up to whole model-parallel replicas."""
    stated: Mapping[str, float] = field(default_factory=dict)
    """Seconds of stages, `reshard MODEL` and `checkpoint`, before the plan's estimates."""
    batch_bytes: int = 16 << 20
    """Bytes of response tokens in a batch; larger batches carry the same share of every row."""


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is told at its start."""

    plan_json: str
    pool: str
    first: int
    """The first of its ranks."""
    count: int
    """Ranks that it stands for."""
    member: int
    """Its number among the workers of its pool."""
    members: dict[str, int]
    """Workers of every pool."""
    sizes: dict[str, int]
    """Ranks of every pool, in the order of the plan."""
    run_dir: str
    seed: int
    speed_up: float
    epoch: float
    """At which the plan's clock starts, in seconds of this machine's."""
    payload_share: float
    settings: VirtualSettings
    queues: dict[str, Any] = field(default_factory=dict)
    """Actors of the queues of this pool."""
    control: Any = None
    """Actor of what the pools agree on."""
    fabric: Any = None
    """Actor in place of process groups."""


def times_of(plan: Plan, settings: VirtualSettings) -> Durations:
    """RunFailure RLF4004 where the time of a model stage is not known, RLF1001 for a stated name that is no stage."""
    phases = (STEP, *dict.fromkeys(e.name for program in plan.programs for e in program.evaluations))
    return durations_of(plan, settings.stated, phases=phases)


def speed_up_of(plan: Plan, settings: VirtualSettings, durations: Durations) -> float:
    """The given one, or that with which the longest list of a step takes `STEP_SECONDS`."""
    if settings.speed_up is not None:
        return settings.speed_up
    longest = max(sum(us for _, us in slept(plan, program, durations)) for program in plan.programs)
    return float(f"{longest / 1e6 / STEP_SECONDS:.1g}")


def slept(plan: Plan, program: Program, durations: Durations) -> list[tuple[str, float]]:
    """(what, microseconds of the plan) of everything that a step of a pool sleeps for."""
    found: list[tuple[str, float]] = []
    for instruction in program.step:
        match instruction:
            case RunStage() if plan.stage(instruction.stage).op.kind != "score":
                found.append((instruction.stage, float(durations.of(instruction.stage, 0))))
            case WaitStage():
                found.append((instruction.stage, float(durations.of(instruction.stage, 0))))
            case ReshardWeights():
                found.append((f"reshard {instruction.model}", reshard_us(plan, instruction, durations)))
            case MoveObject():
                found.append((instruction.id, float(instruction.exposed_us)))
    return [(what, us) for what, us in found if us]


def reshard_us(plan: Plan, instruction: ReshardWeights, durations: Durations) -> float:
    """Microseconds of a transfer of weights."""
    known = next((r.us for r in plan.reshards if set(r.readers) & set(instruction.readers)), 0)
    return float(durations.of(f"reshard {instruction.model}", 0, known))


def too_short(plan: Plan, speed_up: float, durations: Durations, late: float | None = None) -> Diagnostic | None:
    """A warning RLF5057 where sleeps are so short that this machine's timer, `late` seconds late, is felt in them."""
    late = overshoot() if late is None else late
    least = late * _RESOLVED
    shortest: dict[str, float] = {}
    for program in plan.programs:
        for what, us in slept(plan, program, durations):
            if us / 1e6 / speed_up < least:
                shortest[what] = us / 1e6
    if not shortest:
        return None
    names = sorted(shortest, key=lambda what: shortest[what])
    told = ", ".join(f"`{what}` {shortest[what] / speed_up * 1e6:.3g} us" for what in names[:3])
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return Diagnostic(
        "RLF5057",
        f"with a speed-up of {speed_up:g} these sleep for less than this machine's timer resolves: {told}{more}",
        notes=(f"it wakes {late * 1e6:.0f} us late; sleeps below {least * 1e3:.2g} ms are off by a tenth or more",),
        help=(f"`--speed-up {_nearest(shortest[names[0]] / least)}` or less resolves all of them",),
        severity=Severity.WARNING,
    )


def _nearest(value: float) -> str:
    """A number with two digits, not above."""
    text = f"{value:.1e}"
    return f"{float(text) if float(text) <= value else float(text) * (1 - 1e-9):.2g}"


def payload_share(plan: Plan, settings: VirtualSettings) -> float:
    """Share of a response's bytes that its row carries: 1 where the largest batch is within the limit."""
    largest = 0.0
    for stage in plan.stages:
        if isinstance(stage.op, Generate):
            largest = max(largest, rows_of(stage)[0] * mean(lengths_in(plan, stage)) * TOKEN_BYTES)
    return min(1.0, settings.batch_bytes / largest) if largest else 1.0


def lengths_in(plan: Plan, stage: Stage) -> Lengths:
    """Of the responses of a generate stage: as its estimate assumes them."""
    assert isinstance(stage.op, Generate)
    facts = engine_of(plan, stage)
    return stated_lengths(stage.op.mean_new, stage.op.max_new) if facts is None else assumed_lengths(facts)


def engine_of(plan: Plan, stage: Stage) -> EngineEstimate | None:
    """What the estimate of a generate stage knows of its engines."""
    return next((estimate.engine for estimate in plan.estimates if estimate.stage == stage.id), None)


def total_steps(plan: Plan) -> int:
    return STEPS if plan.stop.steps is None else plan.stop.steps


def refuse_idle(durations: Durations, plan: Plan) -> None:
    """RunFailure RLF4004 where nothing takes any time: there would be nothing to sleep for."""
    if not any(slept(plan, program, durations) for program in plan.programs):
        raise RunFailure(
            "RLF4004",
            "the plan says of no stage how long it takes, so there is nothing to run virtually",
            help=("state times: `--stage NAME=SECONDS`, or compile with `--profile FILE`",),
        )
