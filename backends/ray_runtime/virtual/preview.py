"""What a virtual run will be, before Ray is started: its speed-up, its workers, and what cannot be trusted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rlflow.backends.ray_runtime.streams.specs import stream_specs
from rlflow.backends.ray_runtime.virtual.crew import crew, virtual_pools
from rlflow.backends.ray_runtime.virtual.settings import (
    VirtualSettings,
    payload_share,
    refuse_idle,
    speed_up_of,
    times_of,
    too_short,
)
from rlflow.diagnostics.diagnostic import Diagnostic, RunFailure
from rlflow.plan import Plan


@dataclass(frozen=True)
class Preview:
    """`settings` with everything decided."""

    settings: VirtualSettings
    warnings: tuple[Diagnostic, ...]
    sentence: str
    facts: dict[str, Any]
    """For run.json."""


def preview_of(plan: Plan, asked: VirtualSettings) -> Preview:
    """RunFailure RLF4004 where the time of a model stage is neither estimated nor stated, RLF1001 for a stated time of
    what is no stage, RLF4003 for samples that are admitted one by one."""
    _refuse_streams(plan)
    durations = times_of(plan, asked)
    refuse_idle(durations, plan)
    settings = replace(asked, speed_up=speed_up_of(plan, asked, durations))
    assert settings.speed_up is not None
    short = too_short(plan, settings.speed_up, durations)
    pools = virtual_pools(plan)
    workers = {name: len(parts) for name, parts in crew(plan, pools, settings).items()}
    devices = sum(len(pool.ranks) for pool in pools)
    share = payload_share(plan, settings)
    listed = ", ".join(f"{count} for `{name}`" for name, count in workers.items())
    rows = "" if share == 1 else f"; rows carry {share:.2%} of their bytes"
    by = f"{devices} devices by {sum(workers.values())} workers ({listed})"
    sentence = f"virtual: {by}, {settings.speed_up:g} times as fast as the plan says{rows}"
    facts = {"speed_up": settings.speed_up, "devices": devices, "workers": workers, "payload_share": share}
    return Preview(settings, () if short is None else (short,), sentence, facts)


def _refuse_streams(plan: Plan) -> None:
    """Batches of a virtual run are blocks of their stage's time."""
    for spec in stream_specs(plan):
        raise RunFailure(
            "RLF4003",
            f"a virtual run makes whole batches in order, and the plan admits the samples of `{spec.stage}` one by one",
            stage=spec.stage,
            help=("`admit in_order` without a trigger runs; `rlflow simulate` shows what the others bring",),
        )
