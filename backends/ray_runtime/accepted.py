"""What a plan may decide and this version of the runtime does not do, whatever the devices."""

from __future__ import annotations

from rlflow.backends.ray_runtime.streams.refusals import refuse_streams
from rlflow.diagnostics import RunFailure
from rlflow.ir.ops import Join, MixedGroups
from rlflow.plan import Plan


def refuse_unknown(plan: Plan) -> None:
    """RunFailure RLF4003 for a stage that several pools sample for, a reshard in place, a refill that reaches into
    another pool, and streams of samples that `streams.refusals` lists."""
    refuse_streams(plan)
    _refuse_refills(plan)
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


def _refuse_refills(plan: Plan) -> None:
    """A refill runs the stages before it again, which must be on its own pool."""
    functions = {pool.name for pool in plan.pools if pool.device == "functions"}
    for stage in plan.stages:
        if not isinstance(stage.op, MixedGroups) or not stage.op.refill:
            continue
        stack = list(stage.inputs.values())
        while stack:
            before = plan.stage(stack.pop())
            stack.extend(before.inputs.values())
            if before.pool != stage.pool and before.pool not in functions:
                raise RunFailure(
                    "RLF4003",
                    f"a refill of `{stage.id}` on pool `{stage.pool}` would run `{before.id}` again, which is on pool "
                    f"`{before.pool}`",
                    stage=stage.id,
                    help=(f"`place` it on `{before.pool}`", "or filter without `refill`"),
                )
