"""A pool that trains and one that reads, of one process each, joined by a real weight channel."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlflow.backends.ray_runtime.deliveries import Reading, due
from rlflow.backends.ray_runtime.reshard_links import ReshardLinks
from rlflow.backends.ray_runtime.weight_channel import WeightChannel
from rlflow.diagnostics.diagnostic import RunFailure
from rlflow.ir.flow import Layout
from rlflow.plan import Evaluation
from rlflow.plan_decisions import Reshard
from rlflow.reshard.endpoint import Endpoint, Fabric
from rlflow.reshard.execute import cut
from rlflow.reshard.plan import plan_reshard
from rlflow.reshard.shards import Sharding
from rlflow.reshard.storage import Storage
from tests.unit.ray_runtime.reshard_cases import whole

TRAINER, READER = 0, 1
LATE = 0.15
"""Seconds that the reader takes before it asks for weights: long beside a step of the trainer."""


@dataclass
class Log:
    """Times are of one clock for all processes, in seconds."""

    values: dict[int, list[float]] = field(default_factory=dict)
    """By step of the reader: the distinct numbers in its weights."""
    received: dict[int, float] = field(default_factory=dict)
    """By version: when the reader asked for it."""
    updated: dict[int, float] = field(default_factory=dict)
    """By step of the trainer: when its weights began to change."""
    versions: list[int] = field(default_factory=list)
    failure: tuple[str, str, float] | None = None
    """Code, message, and the seconds that it took."""
    threads: int = 0
    """Of weight channels, after the end."""


def channel_of(reading: Reading, timeout: float = 30.0, trained: Layout | None = None) -> WeightChannel:
    """The ranks of a layout, of one where there is none, train; the one after them reads the whole model."""
    trained = trained or Layout()
    tensors, _ = whole("qwen3", ())
    ranks = range(trained.size + 1)
    layouts = (trained, tuple(ranks[:-1])), (Layout(), (trained.size,))
    ends = [Endpoint(layout, devices, Storage(dtype="float32", mtp=False)) for layout, devices in layouts]
    planned = plan_reshard(tensors, *ends, Fabric.uniform(len(ranks), 1, 1e9, 1e9))
    group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout), backend="gloo")
    members = {rank: rank for rank in ranks}
    links = ReshardLinks(planned, 1 << 16, dist.get_rank(), members, group, torch.float32, torch.device("cpu"))
    facts: dict[str, Any] = dict.fromkeys(
        ("needed", "local", "received", "lower_bound", "busiest", "sent", "node_in", "node_out"), planned.received_bytes
    )
    reshard = Reshard(
        id="reshard 0",
        model="actor",
        trainer="actor.train",
        readers=("actor.generate",),
        source="learners",
        target="samplers",
        bucket_bytes=1 << 16,
        rounds=1,
        all_to_all=False,
        bound_us=1,
        us=1,
        **facts,
    )
    return WeightChannel(reshard, links, reading, "actor")


def weights() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(array.shape) for name, array in whole("qwen3", ())[1].items()}


def run(lag: int, every: int, last: int, stop: int) -> Log:
    """Steps 1 to `stop` of a run that was planned to go to `last`. Every weight has the number of its version."""
    reading = Reading(True, lag, (Evaluation(name="held", every=every, instructions=()),) if every else ())
    channel = channel_of(reading)
    samples = dist.new_group([TRAINER, READER], backend="gloo")
    log, tensors = Log(), weights()
    channel.start(0, last)
    for step in range(1, stop + 1):
        if dist.get_rank() == TRAINER:
            dist.recv(torch.zeros(1), src=READER, group=samples)
            channel.before_update()
            log.updated[step] = time.monotonic()
            for tensor in tensors.values():
                tensor.fill_(step)
            channel.published(step, lambda: tensors)
        else:
            _read(channel, reading.of_step(step), tensors, log)
            log.values[step] = sorted({float(value) for tensor in tensors.values() for value in tensor.unique()})
            dist.send(torch.ones(1), dst=TRAINER, group=samples)
            if stop == last and any(due(evaluation, step, last) for evaluation in reading.evaluations):
                _read(channel, step, tensors, log)
    if stop < last:
        for version in channel.left(stop):
            _read(channel, version, tensors, log)
    channel.close()
    log.threads = _threads()
    return log


def _read(channel: WeightChannel, version: int, tensors: dict[str, torch.Tensor], log: Log) -> None:
    if version > channel.version:
        time.sleep(LATE)
        log.received[version] = time.monotonic()
        log.versions.append(version)
        channel.receive(version, tensors)


def peer_is_lost(lost: int, how: str, lag: int) -> Log:
    """The process `lost` ends (`dies`) or does nothing for a while (`hangs`) when version 1 is due."""
    channel = channel_of(Reading(True, lag, ()), timeout=1.0)
    dist.barrier()
    channel.start(0, 9)
    log, tensors = Log(), weights()
    if dist.get_rank() == lost:
        if how == "dies":
            os._exit(1)
        time.sleep(2.5)
        return log
    started = time.monotonic()
    try:
        if lost == TRAINER:
            channel.receive(1, tensors)
        else:
            channel.published(1, lambda: tensors)
            channel.before_update()
            channel.close()
    except RunFailure as failure:
        log.failure = failure.code, failure.message, time.monotonic() - started
        if lost == READER:
            with suppress(RunFailure):  # the same, once more
                channel.close()
    log.threads = _threads()
    return log


def reader_is_lost(trained: Layout) -> Log:
    """The last rank ends when version 1 is due; the others tell what they saw, and how long it took."""
    channel = channel_of(Reading(True, 1, ()), timeout=1.0, trained=trained)
    dist.barrier()
    if dist.get_rank() == trained.size:
        os._exit(1)
    channel.start(0, 9)
    known, arrays = whole("qwen3", ())
    parts = cut(Sharding(known, trained, Storage(dtype="float32", mtp=False)), arrays, dist.get_rank())
    log, tensors = Log(), {name: torch.from_numpy(part.copy()) for name, part in parts.items()}
    started = time.monotonic()
    try:
        channel.published(1, lambda: tensors)
        channel.before_update()
    except RunFailure as failure:
        log.failure = failure.code, failure.message, time.monotonic() - started
    with suppress(RunFailure):
        channel.close()
    log.threads = _threads()
    return log


def _threads() -> int:
    return sum(thread.name.startswith("weights of") for thread in threading.enumerate())
