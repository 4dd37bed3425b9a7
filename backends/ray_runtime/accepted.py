"""What a plan may decide and this version of the runtime does not do, whatever the devices."""

from __future__ import annotations

from rlflow.diagnostics import RunFailure
from rlflow.ir.ops import Join
from rlflow.plan import Plan


def refuse_unknown(plan: Plan) -> None:
    """RunFailure RLF4003 for a stage that several pools sample for, for a reshard in place, and for one of adapters."""
    for stage in plan.stages:
        if isinstance(stage.op, Join):
            pools = [plan.stage(part).pool for part in stage.inputs.values()]
            raise RunFailure(
                "RLF4003",
                f"this version does not run a stage on several pools, and `{stage.id}` is on {' and '.join(pools)}",
                stage=stage.id,
                help=(f"`place` it on `{pools[0]}` alone",),
            )
    for reshard in plan.reshards:
        if reshard.in_place:
            raise RunFailure(
                "RLF4003",
                f"this version does not reshard in place, as the plan does with `{reshard.model}`",
                help=(
                    f"`reshard = beside` for {', '.join(f'`{reader}`' for reader in reshard.readers)}, or more memory",
                ),
            )
        if reshard.adapters:
            raise RunFailure(
                "RLF4003",
                f"this version moves no adapters between pools, and the plan sends those of `{reshard.model}`",
                help=("place what samples from it with its training, in the same layout",),
            )
