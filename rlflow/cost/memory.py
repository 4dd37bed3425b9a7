"""Bytes on the fullest device of a stage that passes whole sequences: training, and passes without gradients."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from rlflow.cost.activations import BYTES, layer_activations
from rlflow.cost.components import MIXED, Components, Precision
from rlflow.cost.dimensions import Dimensions
from rlflow.cost.flops import Head
from rlflow.cost.pipelines import PipelineSchedule, in_flight, parameter_copies, schedule_of
from rlflow.cost.shards import Shard, StageLayers, check_layout, layers_of, shard
from rlflow.ir.flow import Layout
from rlflow.values import dataclass


@dataclass(frozen=True, slots=True)
class Batch:
    """What passes through a data-parallel replica at once."""

    tokens: int
    """Of the largest micro-batch."""
    longest: int
    """Tokens of its longest sequence."""
    microbatches: int = 1


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What one pipeline stage holds on a device: bytes, or bytes for a token of a device (`tokens`/cp of a batch)."""

    stage: StageLayers
    schedule: PipelineSchedule
    pp: int
    vp: int
    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Bytes."""
    kept: float
    """Until the backward pass, of a micro-batch; with unequal virtual stages all are taken as large as the largest."""
    kept_scores: float
    """Also for every token of the longest sequence."""
    largest: float
    """Of the largest layer."""
    scores: float
    """Of one layer, for every token of the longest sequence."""
    logits: int
    """Values of one token."""
    exchanged: float


def train_memory(
    model: Dimensions,
    layout: Layout,
    batch: Batch,
    *,
    precision: Precision = MIXED,
    head: Head = "vocabulary",
    flash: bool = True,
    skew: float = 1.0,
    schedule: PipelineSchedule | None = None,
) -> Components:
    """Of the fullest pipeline stage."""
    stages = stage_memories(model, layout, precision, head, flash, skew, schedule)
    return max((_train(stage, layout, batch) for stage in stages), key=_total)


def train_stage_memory(
    model: Dimensions,
    layout: Layout,
    batch: Batch,
    stage: int,
    *,
    precision: Precision = MIXED,
    head: Head = "vocabulary",
    flash: bool = True,
    skew: float = 1.0,
    schedule: PipelineSchedule | None = None,
) -> Components:
    """Of one pipeline stage."""
    check_layout(model, layout)
    layers = layers_of(model, layout)[stage]
    return _train(_stage_memory(model, layout, layers, precision, head, flash, skew, schedule), layout, batch)


def forward_memory(
    model: Dimensions,
    layout: Layout,
    batch: Batch,
    *,
    precision: Precision = MIXED,
    head: Head = "vocabulary",
    skew: float = 1.0,
) -> Components:
    """Of a pass without gradients (log-probabilities, values, the score of a reward model), fullest stage."""
    stages = stage_memories(model, layout, precision, head, True, skew, None)
    tokens = -(-batch.tokens // layout.cp)
    found = [
        Components(
            weights=stage.weights,
            working=ceil(tokens * stage.largest),
            logits=tokens * stage.logits * 4,
            buffers=stage.gathered + ceil(tokens * stage.exchanged),
        )
        for stage in stages
    ]
    return max(found, key=_total)


def parameter_bytes(part: Shard, layout: Layout, precision: Precision, copies: int = 1) -> tuple[int, int, int]:
    """Weights, gradients and optimizer state of a shard in training.

    ZeRO (Rajbhandari et al. 2020) divides the optimizer state from 1 on, gradients from 2 on, weights at 3: of dense
    parameters over dp x cp, of experts over the replicas of an expert.
    """
    dense, expert = part.dense * copies, part.expert * copies
    sharded = -(-dense // (layout.dp * layout.cp)) - (-expert // layout.expert_replicas)
    whole, zero = dense + expert, layout.zero
    return (
        precision.weights * (sharded if zero >= 3 else whole),
        precision.gradients * (sharded if zero >= 2 else whole),
        precision.optimizer * (sharded if zero >= 1 else whole),
    )


@lru_cache(maxsize=8192)
def stage_memories(
    model: Dimensions,
    layout: Layout,
    precision: Precision,
    head: Head,
    flash: bool,
    skew: float,
    schedule: PipelineSchedule | None,
) -> tuple[StageMemory, ...]:
    """Of the stages that can be the fullest: the first of each kind, as later ones hold fewer micro-batches."""
    check_layout(model, layout)
    kinds: dict[tuple[int, int, int, bool, bool], StageLayers] = {}
    for stage in layers_of(model, layout):
        kinds.setdefault((stage.dense, stage.moe, stage.largest_chunk, stage.first, stage.last), stage)
    return tuple(
        _stage_memory(model, layout, stage, precision, head, flash, skew, schedule) for stage in kinds.values()
    )


def _stage_memory(
    model: Dimensions,
    layout: Layout,
    stage: StageLayers,
    precision: Precision,
    head: Head,
    flash: bool,
    skew: float,
    schedule: PipelineSchedule | None,
) -> StageMemory:
    schedule = schedule or schedule_of(layout.vp)
    part = shard(model, layout, stage, head)
    weights, gradients, optimizer = parameter_bytes(part, layout, precision, parameter_copies(schedule))
    each = layer_activations(model, layout, flash=flash, skew=skew)
    uneven = stage.largest_chunk * layout.vp / stage.layers if stage.layers else 1.0
    kept, kept_scores = stage.dense * each.dense + stage.moe * each.moe, stage.layers * each.scores
    if layout.recompute == "full":
        kept, kept_scores = stage.layers * each.input, 0.0
    elif layout.recompute == "selective":
        kept_scores = 0.0
    exchanged = 2.0 * model.hidden * BYTES if layout.pp > 1 else 0.0
    if layout.ep > 1 and part.expert:
        exchanged += 2 * model.top_k * model.hidden * BYTES / layout.tp
    gathers = layout.zero == 3 and layout.dp * layout.cp > 1
    return StageMemory(
        stage=stage,
        schedule=schedule,
        pp=layout.pp,
        vp=layout.vp,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=2 * part.largest_layer * precision.weights if gathers else 0,
        kept=kept * uneven,
        kept_scores=kept_scores * uneven,
        largest=max(each.dense if stage.dense else 0.0, each.moe if stage.moe else 0.0),
        scores=each.scores,
        logits=-(-model.vocab // layout.tp) if stage.last and head == "vocabulary" else 0,
        exchanged=exchanged,
    )


def _train(held: StageMemory, layout: Layout, batch: Batch) -> Components:
    tokens, longest = -(-batch.tokens // layout.cp), batch.longest
    flights = in_flight(held.schedule, held.pp, batch.microbatches, v=held.vp, stage=held.stage.stage)
    working = held.scores * longest if layout.recompute != "none" else 0.0
    if layout.recompute == "full":
        working += held.largest
    kept = tokens * (held.kept + held.kept_scores * longest)
    return Components(
        weights=held.weights,
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=ceil(kept * flights),
        working=ceil(tokens * working),
        logits=tokens * held.logits * (4 + BYTES),
        buffers=held.gathered + ceil(tokens * held.exchanged),
    )


def _total(part: Components) -> int:
    return part.total
