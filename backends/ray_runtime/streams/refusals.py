"""Flows and plans whose samples this version cannot stream: they are refused with a word before anything starts."""

from __future__ import annotations

from rlflow.backends.ray_runtime.streams.specs import is_stream
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.ops import Generate, MixedGroups, Take, Train
from rlflow.plan import MoveObject, Plan, Stage, StaleReader


def refuse_streams(plan: Plan) -> None:
    """RunFailure RLF4003 for what is asked together with an admission rule, a trigger or bursts and does not run."""
    streams = [(c.model, stale) for c in plan.channels for stale in c.stale if is_stream(stale)]
    pools: dict[str, str] = {}
    for model, stale in streams:
        stage, asked = plan.stage(stale.stage), _asked(stale)
        if stage.pool in pools:
            raise _refused(
                f"`{pools[stage.pool]}` and `{stage.id}` both sample on pool `{stage.pool}`, and the plan {asked}",
                stage.id,
                "place them on pools of their own",
            )
        pools[stage.pool] = stage.id
        _refuse_stage(stage, stale, asked)
        _refuse_prompts(plan, stage, asked)
        _refuse_readers(plan, stage, model, asked)
        _refuse_pool(plan, stage, model, asked)


def _asked(stale: StaleReader) -> str:
    if stale.trigger != 1.0:
        return f"starts a step at {stale.trigger:.0%} of the samples"
    if stale.admit != "in_order":
        return f"admits samples by `{stale.admit}`"
    return f"admits {stale.burst} batches at once"


def _refuse_stage(stage: Stage, stale: StaleReader, asked: str) -> None:
    op = stage.op
    assert isinstance(op, Generate)
    if stale.carry == "nothing" and stale.trigger != 1.0:
        raise _refused(
            f"no training begins on a part of its batch, and the plan {asked} of `{stage.id}` and carries nothing",
            stage.id,
            "leave the trigger out: the same samples are trained on",
            "`carry partial` or `carry finish`, which let a step take fewer samples",
        )
    if op.environment is not None:
        raise _refused(
            f"conversations with `{op.environment}` cannot be left unfinished, and the plan {asked}",
            stage.id,
            "`admit in_order` without a trigger",
        )
    layout = stage.layout
    if layout is not None and max(layout.pp * layout.cp, layout.ep) > 1:
        raise _refused(
            f"`{stage.id}` is placed with pp, cp or ep, and the plan {asked}", stage.id, "place it with tp alone"
        )


def _refuse_prompts(plan: Plan, stage: Stage, asked: str) -> None:
    op, take = stage.op, plan.stage(stage.inputs["prompts"])
    assert isinstance(op, Generate)
    if not isinstance(take.op, Take) or take.op.count is None or take.pool != stage.pool or op.part is not None:
        raise _refused(
            f"the prompts of `{stage.id}` must come from a `take(N prompts)` on its own pool, for the plan {asked}",
            stage.id,
        )
    for other in plan.stages:
        if other.id != stage.id and take.id in other.inputs.values():
            raise _refused(
                f"`{other.id}` reads the prompts `{take.id}` beside `{stage.id}`, and the plan {asked}",
                other.id,
                f"take prompts for `{other.id}` from a data set of its own",
            )
        takes_too = other.id != take.id and isinstance(other.op, Take) and other.phase == "step"
        if takes_too and isinstance(other.op, Take) and other.op.data == take.op.data:
            raise _refused(
                f"`{other.id}` and `{take.id}` take from one data set, and the plan {asked}",
                other.id,
                "declare the data twice",
            )


def _refuse_readers(plan: Plan, stage: Stage, model: str, asked: str) -> None:
    for other in plan.stages:
        if other.id == stage.id or other.phase != "step":
            continue
        if isinstance(other.op, Generate) and other.op.model == model:
            raise _refused(f"`{other.id}` samples from `{model}` beside `{stage.id}`, and the plan {asked}", other.id)
        whole = isinstance(other.op, MixedGroups) and (other.op.refill or other.op.on_short == "error")
        if whole and _comes_from(plan, other, stage.id):
            raise _refused(
                f"`{other.id}` wants as many groups as the step takes prompts, and the plan {asked} of `{stage.id}`",
                other.id,
                'without `refill`, and with `on_short = "train"`, a step trains on the groups that are left',
            )


def _refuse_pool(plan: Plan, stage: Stage, model: str, asked: str) -> None:
    if any(isinstance(instruction, MoveObject) for instruction in plan.program(stage.pool).step):
        raise _refused(
            f"the plan moves memory of pool `{stage.pool}` to the host during a step, and {asked}",
            stage.id,
            f"`pool {stage.pool} = ... {{ swap = false }}`",
        )
    if any(isinstance(s.op, Train) and s.op.model == model and s.pool == stage.pool for s in plan.stages):
        raise _refused(f"`{model}` samples and trains on pool `{stage.pool}`, and the plan {asked}", stage.id)


def _comes_from(plan: Plan, stage: Stage, source: str) -> bool:
    """Whether what a stage reads comes, over any number of stages, from `source`."""
    return any(name == source or _comes_from(plan, plan.stage(name), source) for name in stage.inputs.values())


def _refused(message: str, stage: str, *help: str) -> RunFailure:
    return RunFailure("RLF4003", message, stage=stage, help=help)
