"""What is compiled and simulated: three schedules on three clusters, the ablation, and what else was tried."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rlflow import driver
from rlflow.plan import MoveObject, Plan

HERE = Path(__file__).parent
SCHEDULES = ("baseline", "fusion", "stalesync")
SUPERNODES = (1, 2, 4)
LONGEST = 32768
"""Tokens. Calibrated: of 8192, 16384 and 32768 the limit that comes closest to the baseline of one supernode."""
PROMPTS = {1: 768, 2: 1248, 4: 2112}
"""A step, by supernodes. Of four: calibrated on 85 % linearity of RL Fusion. Of two: half as many doublings, 768 times
(2112 / 768)^(1/2) = 1274, rounded to a multiple of 96, which all layouts divide."""
MINIBATCHES = 4
"""Updates of a step."""
STALENESS = "  staleness actor = 1 step\n"
TRIGGER = "  trigger samples at 75%, carry partial\n"


@dataclass(frozen=True, slots=True)
class Case:
    """One plan and how it is simulated."""

    schedule: str
    supernodes: int = 1
    seed: int | None = None
    """Of the lengths that are drawn; None: every stage takes the time of its estimate."""
    staleness: int = 1
    """Steps. For StaleSync only, as is the trigger."""
    trigger: int = 75
    """%; 100 is no trigger."""
    rollout: int | None = None
    """Devices that generate, in place of those in the file: the baseline on one supernode only."""
    longest: int = LONGEST
    prompts: int | None = None
    switch_s: float | None = None
    """Seconds of a whole switch of RL Fusion; None: by the plan."""

    @property
    def key(self) -> str:
        """Names the case in the file of results: whatever differs from the defaults."""
        parts = [self.schedule, str(self.supernodes)]
        for name in ("seed", "staleness", "trigger", "rollout", "longest", "prompts", "switch_s"):
            value = getattr(self, name)
            if value != Case.__dataclass_fields__[name].default:
                parts.append(f"{name}={value}")
        return " ".join(parts)

    @property
    def batch(self) -> int:
        """Prompts of a step."""
        return self.prompts or PROMPTS[self.supernodes]


def plan_of(case: Case) -> Plan:
    """Raises CompileError where the case does not fit."""
    prompts = case.batch
    overrides = (
        f"prompts={prompts} prompts",
        f"minibatch={prompts * 16 // MINIBATCHES} samples",
        f"longest={case.longest} tokens",
    )
    options = driver.Options(cluster=f"supernodes{case.supernodes}", overrides=overrides)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("flow", case.schedule):
            text = (HERE / f"{name}.rlflow").read_text("utf-8")
            Path(folder, f"{name}.rlflow").write_text(_changed(text, case), "utf-8")
        plan = driver.compile(Path(folder, f"{case.schedule}.rlflow"), options)
    return plan if case.switch_s is None else _without_moves(plan)


def stated(case: Case) -> dict[str, float]:
    """Times in place of the plan's."""
    return {} if case.switch_s is None else {"reshard actor": case.switch_s}


def inputs() -> dict[str, str]:
    """What results are of: file to its SHA-256, and the settings that are not in a file."""
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(HERE.glob("*.rlflow"))}
    return found | {"longest": str(LONGEST), "prompts": str(PROMPTS), "minibatches": str(MINIBATCHES)}


def _changed(text: str, case: Case) -> str:
    """The schedule with what the case pins differently."""
    if case.schedule == "stalesync" and STALENESS in text:
        steps = f"  staleness actor = {case.staleness} step{'s' * (case.staleness != 1)}\n"
        text = text.replace(STALENESS, steps if case.staleness else "")
        again = f"  trigger samples at {case.trigger}%, carry partial\n"
        text = text.replace(TRIGGER, again if case.trigger < 100 else "")
    if case.rollout is not None:
        text = text.replace("pool rollout = 384 devices", f"pool rollout = {case.rollout} devices")
        text = text.replace("pool learner = 384 devices", f"pool learner = {768 - case.rollout} devices")
    return text


def _without_moves(plan: Plan) -> Plan:
    """Swaps that take no time: the stated seconds of the reshard stand for the whole switch."""
    programs = []
    for program in plan.programs:
        step = tuple(
            i.model_copy(update={"us": 0, "exposed_us": 0}) if isinstance(i, MoveObject) else i for i in program.step
        )
        programs.append(program.model_copy(update={"step": step}))
    return plan.model_copy(update={"programs": tuple(programs)})
