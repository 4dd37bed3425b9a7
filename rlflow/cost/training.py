"""Seconds and bytes of passes over whole sequences: training, log-probabilities, values, scores.

T = sum over micro-batches of the slowest stage + the pipeline's bubble + the wait for the fullest data-parallel rank
+ what of the gradients' reduction is exposed + the optimizer. Backward costs twice forward.
"""

from __future__ import annotations

from rlflow.cost.dimensions import Dimensions
from rlflow.cost.flops import attention_share
from rlflow.cost.machine import Machine
from rlflow.cost.memory import Batch, forward_memory, train_memory
from rlflow.cost.microbatch import mean_sequence, mean_square, microbatches, rank_imbalance
from rlflow.cost.passes import Forward, Micro, Networks, StageWork, forward_pass, networks, stage_works
from rlflow.cost.pipelines import PipelineSchedule, bubble_seconds, check_schedule, schedule_of
from rlflow.cost.roofline import memory_seconds
from rlflow.cost.shards import Shard, check_layout
from rlflow.cost.stages import ComputeOptions, StageCost, Workload
from rlflow.ir.flow import Layout

DEFAULT = ComputeOptions()


def train(
    model: Dimensions, layout: Layout, machine: Machine, work: Workload, options: ComputeOptions = DEFAULT
) -> StageCost:
    """All updates of one batch. LayoutError where layout, model and schedule do not go together."""
    check_layout(model, layout)
    minibatch = min(work.minibatch or work.rows, work.rows)
    updates = work.epochs * -(-work.rows // minibatch)
    schedule = options.schedule or schedule_of(layout.vp)
    micro = micro_of(layout, work, minibatch, schedule)
    check_schedule(schedule, layout.pp, micro.count, layout.vp)
    static = train_memory(
        model,
        layout,
        Batch(_largest(work, micro), work.longest, micro.count),
        precision=options.precision,
        head=options.head,
        flash=options.flash,
        skew=options.skew,
        schedule=schedule,
    )
    efficiency = _efficiency(model, machine)
    works, joined = stage_works(model, layout, options), networks(model, layout, machine, options.skew)
    passes = [forward_pass(each, joined, machine, micro, efficiency) for each in works]
    rows = [_train_parts(each, layout) for each in passes]
    sums = [sum(row.values()) for row in rows]
    total = max(sums)
    slowest = rows[sums.index(total)]
    if schedule in ("1f1b", "interleaved"):
        bubble = (
            sum(len(each.stages) * seconds for each, seconds in zip(works, sums, strict=True)) - total
        ) / layout.vp
    else:
        forward = max(each.compute for each in passes)
        weight = max(each.products + each.head for each in passes)
        bubble = bubble_seconds(schedule, layout.pp, forward, total - forward, min(weight, total - forward))
    parts = {name: micro.count * seconds for name, seconds in slowest.items()}
    parts["bubble"] = bubble
    spread = _imbalance(model, layout, work, minibatch)
    parts["imbalance"] = (spread - 1) * (sum(parts.values()))
    parts |= _update_parts(layout, machine, joined, _largest_shard(works), options, micro, total)
    return StageCost.of(tuple((name, updates * seconds) for name, seconds in parts.items() if seconds), static)


def stage_seconds(
    model: Dimensions, layout: Layout, machine: Machine, micro: Micro, options: ComputeOptions = DEFAULT
) -> list[float]:
    """Forward and backward of one micro-batch on every pipeline stage, in order, collectives included."""
    check_layout(model, layout)
    joined, efficiency = networks(model, layout, machine, options.skew), _efficiency(model, machine)
    seconds = [0.0] * layout.pp
    for each in stage_works(model, layout, options):
        parts = _train_parts(forward_pass(each, joined, machine, micro, efficiency), layout)
        for stage in each.stages:
            seconds[stage] = sum(parts.values())
    return seconds


def logprobs(
    model: Dimensions, layout: Layout, machine: Machine, work: Workload, options: ComputeOptions = DEFAULT
) -> StageCost:
    """One forward pass over the batch: log-probabilities, and with a scalar head values or a reward model's scores."""
    check_layout(model, layout)
    micro = micro_of(layout, work, work.rows, "1f1b")
    static = forward_memory(
        model,
        layout,
        Batch(_largest(work, micro), work.longest, micro.count),
        precision=options.precision,
        head=options.head,
        skew=options.skew,
    )
    efficiency = min(1.0, _efficiency(model, machine) * machine.calibration.knobs.logprobs_over_train)
    works, joined = stage_works(model, layout, options), networks(model, layout, machine, options.skew)
    rows = [_forward_parts(forward_pass(each, joined, machine, micro, efficiency)) for each in works]
    sums = [sum(row.values()) for row in rows]
    total = max(sums)
    slowest = rows[sums.index(total)]
    parts = {name: micro.count * seconds for name, seconds in slowest.items()}
    parts["bubble"] = (
        sum(len(each.stages) * seconds for each, seconds in zip(works, sums, strict=True)) - total
    ) / layout.vp
    parts["imbalance"] = (_imbalance(model, layout, work, work.rows) - 1) * sum(parts.values())
    if layout.zero == 3:
        gather = _gather(joined, _largest_shard(works), options.precision.weights)
        parts["sharded_weights"] = micro.count * max(0.0, gather - total)
    return StageCost.of(tuple((name, seconds) for name, seconds in parts.items() if seconds), static)


def micro_of(layout: Layout, work: Workload, rows: int = 0, schedule: PipelineSchedule = "1f1b") -> Micro:
    """The mean micro-batch of the replica with the most of `rows` samples (0 = the batch), and how many it has.

    Schedules that need a multiple of some number of micro-batches get it.
    """
    rows = -(-(rows or work.rows) // layout.dp)
    count = microbatches(work.prompt, work.response, rows, work.microbatch_tokens)
    if schedule == "interleaved":
        count = -(-count // layout.pp) * layout.pp
    elif schedule == "dualpipe":
        count = max(2 * layout.pp, count + count % 2)
    tokens = rows * mean_sequence(work.prompt, work.response)
    return Micro(count, tokens / count, rows * mean_square(work.prompt, work.response) / count)


def _largest(work: Workload, micro: Micro) -> int:
    """Tokens of the fullest micro-batch: the budget if that is used up, or one longest sequence."""
    return max(work.longest, min(work.microbatch_tokens, int(micro.count * micro.tokens) + 1))


def _efficiency(model: Dimensions, machine: Machine) -> float:
    knobs = machine.calibration.knobs
    return knobs.train_moe if model.experts else knobs.train_dense


def _imbalance(model: Dimensions, layout: Layout, work: Workload, rows: int) -> float:
    """Work of the fullest replica over that of one with the most rows but mean lengths."""
    if layout.dp == 1:
        return 1.0
    most = rank_imbalance(work.prompt, work.response, rows, layout.dp, attention_share(model))
    return max(1.0, most * rows / layout.dp / -(-rows // layout.dp))


def _forward_parts(f: Forward) -> dict[str, float]:
    return {
        "products": f.products + f.head,
        "attention": f.attention,
        "elementwise": f.elementwise,
        "tensor_parallel": f.tensor_parallel,
        "context_parallel": max(0.0, f.context_parallel - f.attention),
        "expert_parallel": f.expert_parallel,
        "pipeline": f.pipeline,
    }


def _train_parts(f: Forward, layout: Layout) -> dict[str, float]:
    """Forward, backward at twice the forward, and what is computed again."""
    again = 1.0 if layout.recompute == "full" else 0.0
    recompute = again * (f.products + f.attention + f.elementwise)
    if layout.recompute == "selective":
        recompute = f.attention
    return {
        "products": 3 * (f.products + f.head),
        "attention": 3 * f.attention,
        "elementwise": 3 * f.elementwise,
        "recompute": recompute,
        "tensor_parallel": (2 + again) * f.tensor_parallel,
        "context_parallel": max(0.0, (3 + again) * (f.context_parallel - f.attention)),
        "expert_parallel": (2 + again) * f.expert_parallel,
        "pipeline": 2 * f.pipeline,
    }


def _update_parts(
    layout: Layout,
    machine: Machine,
    joined: Networks,
    part: Shard,
    options: ComputeOptions,
    micro: Micro,
    compute: float,
) -> dict[str, float]:
    """What comes once an update: reducing gradients, gathering parameters, the optimizer."""
    precision = options.precision
    replicas, copies = layout.dp * layout.cp, layout.expert_replicas
    gradients = _gather(joined, part, precision.gradients)
    weights = _gather(joined, part, precision.weights)
    if layout.zero == 3:
        # FSDP gathers weights forward and backward and reduces gradients for every micro-batch, behind its computing.
        comm = {"sharded_weights": micro.count * max(0.0, 2 * weights + gradients - compute)}
    else:
        reduction = gradients + (weights if layout.zero else gradients)
        backward = compute * 2 / 3
        comm = {"data_parallel": reduction - min(options.overlap * reduction, backward)}
    over, expert_over = (replicas, copies) if layout.zero else (1, 1)
    owned = part.dense / over + part.expert / expert_over
    traffic = owned * (2 * precision.optimizer + precision.gradients + precision.weights)
    rate = machine.memory_bytes_per_s
    return comm | {"optimizer": memory_seconds(traffic, rate, machine.calibration.constants.memory_copy)}


def _gather(joined: Networks, part: Shard, size: int) -> float:
    """All-gather of a stage's parameters in numbers of `size` bytes: dense ones over dp x cp, experts over replicas."""
    return joined.replicas.fastest(part.dense * size) + joined.expert_replicas.fastest(part.expert * size)


def _largest_shard(works: tuple[StageWork, ...]) -> Shard:
    return max((each.shard for each in works), key=lambda part: part.total)
