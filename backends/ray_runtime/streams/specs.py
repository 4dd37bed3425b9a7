"""Which generate stages of a plan are streams, with all that the runtime needs to know of them. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.ir.ops import Generate, Take, Train
from rlflow.plan import Plan, StaleReader
from rlflow.protocol.settings import Settings
from rlflow.protocol.stale_settings import settings_of


@dataclass(frozen=True)
class StreamSpec:
    """One generate stage whose samples are admitted and trained on one group at a time."""

    stage: str
    take: str
    """The stage that gives its prompts."""
    data: str
    model: str
    source: str
    """Pool that samples."""
    trainer: str
    """Pool that trains the model."""
    settings: Settings
    worst_age: int | None
    """steps; None = no sample has a bound"""
    together: int
    """Ranks that hold the model together (tensor parallelism) and sample as one replica; they follow one another."""

    @property
    def drains(self) -> bool:
        """Whether new weights wait for the samples that are under way. Otherwise these go on with the new ones.

        `carry finish` says so. In order without a trigger every sample is made by one version, too.
        """
        trigger = self.settings.trigger
        return trigger.carry == "finish" and (trigger.carries or self.settings.rule == "in_order")

    @property
    def binds_early(self) -> bool:
        """Whether the samples of a step are the same whenever one asks, so that nobody need wait until it starts."""
        return self.settings.rule == "in_order" and not self.settings.trigger.carries


def is_stream(stale: StaleReader) -> bool:
    """Whether more is asked for than whole batches, one after another."""
    return stale.trigger != 1.0 or stale.admit != "in_order" or stale.burst != 1


def stream_specs(plan: Plan) -> list[StreamSpec]:
    """Of all streams of the plan, in its order."""
    return [_spec(plan, c.model, stale) for c in plan.channels for stale in c.stale if is_stream(stale)]


def _spec(plan: Plan, model: str, stale: StaleReader) -> StreamSpec:
    stage = plan.stage(stale.stage)
    take = plan.stage(stage.inputs["prompts"])
    assert isinstance(stage.op, Generate)
    assert isinstance(take.op, Take)
    assert take.op.count is not None
    trainer = next(s for s in plan.stages if isinstance(s.op, Train) and s.op.model == model)
    settings = settings_of(stale, take.op.count * stage.op.n, stage.op.n)
    together = stage.layout.tp if stage.layout is not None else 1
    return StreamSpec(
        stage.id, take.id, take.op.data, model, stage.pool, trainer.pool, settings, stale.worst_age, together
    )
