"""Plans that this version of the runtime does not run, whatever the devices."""

from __future__ import annotations

from rlflow.diagnostics import RunFailure
from rlflow.ir.ops import Join
from rlflow.plan import Plan


def refuse_lent_devices(plan: Plan) -> None:
    """RunFailure RLF4003 for a stage that several pools sample for: its rows would have to be joined."""
    for stage in plan.stages:
        if isinstance(stage.op, Join):
            pools = [plan.stage(part).pool for part in stage.inputs.values()]
            raise RunFailure(
                "RLF4003",
                f"this version does not run a stage on several pools, and `{stage.id}` is on {' and '.join(pools)}",
                stage=stage.id,
                help=(f"`place` it on `{pools[0]}` alone",),
            )
