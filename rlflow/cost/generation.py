"""Seconds and bytes of a generation stage whose requests are all handed in at once."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, exp

from rlflow.cost.activations import BYTES, layer_activations
from rlflow.cost.components import Components, Precision
from rlflow.cost.decode import PARTS, decode_step, prefill_flops
from rlflow.cost.dimensions import Dimensions
from rlflow.cost.groups import Group
from rlflow.cost.kv_cache import KvPool, kv_pool
from rlflow.cost.lengths import mean, second_moment
from rlflow.cost.machine import Machine
from rlflow.cost.occupancy import Requests, occupancy
from rlflow.cost.shards import check_layout, layers_of, shard
from rlflow.cost.stages import EngineOptions, StageCost, Workload
from rlflow.ir.flow import Layout

DEFAULT = EngineOptions()


def generate(
    model: Dimensions, layout: Layout, machine: Machine, work: Workload, options: EngineOptions = DEFAULT
) -> StageCost:
    """From the first prefill to the end of the longest response.

    Every data-parallel replica is an engine; the part `decode_imbalance` is what the busiest takes beyond the mean one.
    A response too long for the cache of an engine is not refused here: the cache then counts one such sequence, and
    `peak_bytes` exceeds the memory of the device.
    """
    requests = requests_of(layout, work, options)
    prompt = mean(work.prompt)
    static, pool = engine_memory(model, layout, machine, work, options)
    step = decode_step(model, layout, machine, precision=options.precision, buckets=options.buckets, skew=options.skew)
    totals, imbalance, waits = [0.0] * len(PARTS), 0.0, 0.0
    prompts = prefill(model, layout, machine, work, options)
    for band in occupancy(work.response, prompt, requests, options.slots, pool.tokens):
        seconds = step.parts(band.running, band.held)
        totals = [total + band.steps * each for total, each in zip(totals, seconds, strict=True)]
        if band.full:
            imbalance += band.steps * band.excess * sum(seconds)
            each = prompts / requests.busiest
            waits += lock_step_wait(band.admitted, band.steps * (1 + band.excess), each, lock_step(layout))
        elif band.excess:
            more = 1 + band.excess
            imbalance += band.steps * (step.seconds(band.running * more, band.held * more) - sum(seconds))
    speed_up = options.speculation.speed_up if options.speculation else 1.0
    named = [(f"decode_{name}", seconds / speed_up) for name, seconds in zip(PARTS, totals, strict=True)]
    parts = [("prefill", prompts), *named, ("decode_imbalance", imbalance / speed_up), ("prefill_wait", waits)]
    return StageCost.of(tuple((name, seconds) for name, seconds in parts if seconds), static)


def lock_step(layout: Layout) -> int:
    """Engines whose experts are common: each step of one waits for the slowest."""
    together = layout.ep * layout.etp // (layout.tp * layout.pp) if layout.ep > 1 else 1
    return max(1, min(layout.dp * layout.cp, together))


def lock_step_wait(prefills: float, steps: float, seconds: float, engines: int) -> float:
    """Seconds that an engine waits for prefills of the others, which come one by one over so many steps of each.

    In a step an engine has a number of them that is Poisson with the mean prefills/steps, and all wait for the engine
    with the most: E[max] of them, less what it has itself.
    """
    if engines == 1 or prefills <= 0 or steps <= 0:
        return 0.0
    rate = prefills / steps
    most, term, below = 0.0, exp(-rate), 0.0
    for count in range(1, 1000):
        below += term
        more = 1.0 - min(1.0, below) ** engines
        most += more
        term *= rate / count
        if more < 1e-6:
            break
    return steps * seconds * (most - rate)


def requests_of(layout: Layout, work: Workload, options: EngineOptions) -> Requests:
    return Requests(work.prompts, work.samples, layout.dp * layout.cp, options.spread)


def prefill(
    model: Dimensions, layout: Layout, machine: Machine, work: Workload, options: EngineOptions = DEFAULT
) -> float:
    """Seconds of all prompts of the busiest engine: once a prompt where samples share it, otherwise once a sample."""
    requests = requests_of(layout, work, options)
    prompts = requests.busiest
    if options.shared_prefix:
        # Samples of one prompt on several engines are prefilled on each.
        prompts = min(work.prompts, prompts) if options.spread else -(-work.prompts // requests.engines)
    tokens = prompts * mean(work.prompt)
    flops = prefill_flops(model, tokens, prompts * second_moment(work.prompt), prompts)
    rate = machine.flop_per_s * machine.calibration.constants.prefill_flops
    passes = ceil(tokens / options.prefill_tokens)
    size = min(tokens, options.prefill_tokens) * model.hidden * BYTES
    reduce = 2 * model.layers * passes * Group(layout.tp).all_reduce(size, machine) if layout.tp > 1 else 0.0
    return flops / (layout.tp * layout.pp) / rate + reduce


def engine_memory(
    model: Dimensions, layout: Layout, machine: Machine, work: Workload, options: EngineOptions = DEFAULT
) -> tuple[Components, KvPool]:
    """What the fullest device holds, and the cache that the rest has room for.

    The cache counts what the batch can ask for at once, as far as there is room, and one longest sequence at least.
    """
    tokens = max(1, min(options.prefill_tokens, ceil(work.rows * work.prompt.maximum)))
    weights, working, logits, pool = _engine(
        model,
        layout,
        machine.memory_bytes,
        tokens,
        options.slots,
        options.memory_share,
        options.precision,
        options.skew,
    )
    wanted = min(requests_of(layout, work, options).busiest, options.slots) * work.longest
    held = max(min(wanted, pool.tokens), work.longest) * pool.bytes_per_token
    return Components(weights=weights, working=working, logits=logits, kv_cache=held), pool


@lru_cache(maxsize=8192)
def _engine(
    model: Dimensions,
    layout: Layout,
    memory_bytes: int,
    tokens: int,
    slots: int,
    memory_share: float,
    precision: Precision,
    skew: float,
) -> tuple[int, int, int, KvPool]:
    """Weights, working memory and logits of the fullest stage, and its cache."""
    check_layout(model, layout)
    each = layer_activations(model, layout, skew=skew)
    found = []
    for stage in layers_of(model, layout):
        weights = shard(model, layout, stage).total * precision.weights
        working = ceil(tokens * max(each.dense if stage.dense else 0.0, each.moe if stage.moe else 0.0))
        logits = slots * -(-model.vocab // layout.tp) * 4 if stage.last else 0
        found.append((weights, working, logits))
    fullest = max(found, key=sum)
    return (*fullest, kv_pool(model, layout, memory_bytes, sum(fullest), share=memory_share, precision=precision))
