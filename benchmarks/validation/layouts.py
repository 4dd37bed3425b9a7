"""Layouts of published runs, read from the words of their source. What a row leaves open is decided here."""

from __future__ import annotations

import re
from dataclasses import replace
from math import gcd

from benchmarks.validation.hardware import device_of, units
from benchmarks.validation.runs import Run
from rlflow.cost.components import MIXED
from rlflow.cost.dimensions import Dimensions
from rlflow.cost.shards import layers_of, shard
from rlflow.cost.stages import EngineOptions
from rlflow.ir.flow import Layout

BUCKETS = (1, 2, 4, *range(8, 513, 8))
"""Batch sizes that vLLM captures graphs for."""
ASCEND_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Fewer on Ascend, where a graph takes more memory."""
SLOTS = 256
"""max_num_seqs of vLLM where a row does not say."""


def devices_of(run: Run, role: str) -> int:
    """Logical devices of the `rollout` or `train` side: all of them where the two share, half where a row does not say
    how they are divided."""
    count = run.count(f"n_{role}_devices")
    if count is None:
        count = run.count("n_devices")
        if count is None:
            raise ValueError(f"row {run.id} does not say how many devices it has")
        if run.text["placement"] == "disaggregated":
            count = count // 2
    return count * units(run)


def rollout_layout(run: Run, model: Dimensions) -> Layout:
    """Of one engine, times as many as there are.

    Without expert parallelism experts are split like everything else (what vLLM does); on Ascend they are dealt out
    over all dies of an instance, as every row there that speaks of it does.
    """
    column, devices = "rollout_layout", devices_of(run, "rollout")
    if not re.search(r"\d", run.text[column]):
        return _open_engine(run, model, devices)
    dp, tp, ep = (run.size(column, name) for name in ("dp", "tp", "ep"))
    if ep is None and "Ascend" in run.text["device"]:
        ep = min(devices, model.experts)
    if tp is None:
        tp = devices // dp if dp else 1
    layout = Layout(dp=devices // tp, tp=tp)
    if not model.experts:
        return layout
    return replace(layout, ep=ep) if ep else replace(layout, etp=tp)


def engine_options(run: Run, model: Dimensions) -> EngineOptions:
    """Slots and captured graphs. Frameworks deal a batch in order, so a prompt's samples stay together where there are
    as many prompts as engines."""
    slots = run.said("rollout_layout", r"max_num_seqs (\d+)") or SLOTS
    buckets = ASCEND_BUCKETS if "Ascend" in run.text["device"] else BUCKETS
    if "graph buckets off" in run.text["note"]:
        buckets = (slots,)
    engines = rollout_layout(run, model).dp
    return EngineOptions(
        slots=slots,
        buckets=tuple(sorted({*(b for b in buckets if b < slots), slots})),
        spread=(run.count("prompts_per_step") or 1) < engines,
    )


def train_layout(run: Run, model: Dimensions) -> Layout:
    """Layers as even as possible, the ends of a pipeline with the fewer; ZeRO 1 as in
    Megatron, 3 with FSDP; full recompute, which every reinforcement learning framework here turns on, unless the row
    says otherwise."""
    column, devices = "train_layout", devices_of(run, "train")
    text = run.text[column]
    tp, pp, cp, ep = (run.size(column, name) or 1 for name in ("tp", "pp", "cp", "ep"))
    if "FSDP" in text:
        return Layout(dp=devices, zero=3, recompute="full")
    if not re.search(r"\b(tp|pp|cp|ep)\d", text):
        return _open_trainer(run, model, devices)
    vp = run.said(column, r"(\d+) virtual stages") or 1
    layout = Layout(dp=devices // (tp * pp * cp), tp=tp, pp=pp, cp=cp, vp=vp, sp=tp > 1, zero=1, recompute="full")
    if model.experts:
        # A recipe's size that its devices have no room for is taken as far as it fits (N18).
        layout = replace(layout, ep=gcd(ep, layout.dp * cp * tp))
    if model.layers % (pp * vp):
        layout = replace(layout, split=even_split(model.layers, pp * vp))
    return layout


def _open_engine(run: Run, model: Dimensions, devices: int) -> Layout:
    """Where a row does not say: the least tensor parallelism at which weights take 40 % of a device."""
    tp = 1
    while tp < 8 and weight_bytes(model) / tp > 0.4 * device_of(run).memory_bytes:
        tp *= 2
    return Layout(dp=devices // tp, tp=tp, etp=tp if model.experts else 1)


def _open_trainer(run: Run, model: Dimensions, devices: int) -> Layout:
    """Where a row does not say: sharded weights, and for a mixture of experts eight expert groups in Megatron."""
    if not model.experts:
        return Layout(dp=devices, zero=3, recompute="full")
    return Layout(dp=devices, ep=gcd(8, devices), zero=1, recompute="full")


def weight_bytes(model: Dimensions) -> int:
    """All weights in 16 bits."""
    return shard(model, Layout(), layers_of(model, Layout())[0]).total * MIXED.weights


def even_split(layers: int, parts: int) -> tuple[int, ...]:
    """Layers of every stage: the short ones first, last, second, ...: the ends also have embedding and head."""
    most = -(-layers // parts)
    split = [most] * parts
    for i in range(most * parts - layers):
        split[i // 2 if i % 2 == 0 else parts - 1 - i // 2] -= 1
    return tuple(split)
