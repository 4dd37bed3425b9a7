"""Response lengths that a run imposes, as benchmarks of rollout engines do: a draw ends a sample, not the model.

A length depends on seed, stage, prompt and number of the sample, and is the one that a simulation of the plan draws. So
every plan of a flow gets the same lengths, whatever its pools, batches and order.
"""

from __future__ import annotations

from rlflow.cost.draws import LengthSampler
from rlflow.cost.errors import WorkloadError
from rlflow.cost.lengths import Lengths
from rlflow.cost.stated_lengths import FORMS, StatedLengths, read_lengths
from rlflow.diagnostics import RunFailure
from rlflow.ir.flow import STEP
from rlflow.ir.ops import Generate
from rlflow.plan import Plan


def imposed_lengths(plan: Plan, text: str, seed: int) -> dict[str, LengthSampler]:
    """By the generate stages of a step, what `--lengths TEXT` draws; evaluations are left to the model.

    RunFailure RLF5063 for a text that states no lengths, or none that a stage can have.
    """
    try:
        stated = read_lengths(text)
    except WorkloadError as error:
        raise RunFailure("RLF5063", f"`--lengths` states no lengths: {error}", help=(f"write {FORMS}",)) from None
    samplers: dict[str, LengthSampler] = {}
    for stage in plan.stages:
        if not isinstance(stage.op, Generate) or stage.phase != STEP:
            continue
        if stage.op.environment is not None:
            raise RunFailure(
                "RLF5063",
                f"`--lengths` is not for `{stage.id}`: the environment `{stage.op.environment}` ends its samples",
                stage=stage.id,
                help=("leave `--lengths` out",),
            )
        samplers[stage.id] = LengthSampler(_fitting(stated, stage.op.max_new, stage.id), seed, stage.id)
    return samplers


def _fitting(stated: StatedLengths, max_new: int, stage: str) -> Lengths:
    try:
        return stated.of(max_new)
    except WorkloadError:
        raise RunFailure(
            "RLF5063",
            f"`--lengths`: a mean of {stated.mean:g} tokens, and `{stage}` makes at most {max_new}",
            stage=stage,
            help=(f"a mean below {max_new}, or a larger `max_new`",),
        ) from None
