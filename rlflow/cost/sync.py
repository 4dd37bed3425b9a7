"""Seconds of moving weights: from a trainer to engines, between device and host; and of a controller."""

from __future__ import annotations

from math import ceil

from rlflow.cost.machine import Link, Machine


def weight_sync(
    size: float,
    link: Link,
    machine: Machine,
    *,
    bucket_bytes: float = 2**30,
    meta_s: float = 0.0,
    load_s: float = 0.0,
    quantise_s: float = 0.0,
    kv_flush_s: float = 0.0,
) -> float:
    """`size` bytes over the busiest link: bandwidth at the share that software reaches, and a latency a bucket.

    `size` is all that passes through a device: the whole model where tensors are gathered or broadcast whole before
    each device takes its part, as the published systems do, and its own part where only that is sent.
    """
    buckets = ceil(size / bucket_bytes) if size > 0 else 0
    moved = size / (link.bytes_per_s * machine.calibration.knobs.sync_bandwidth) + buckets * link.latency_s
    return meta_s + moved + load_s + quantise_s + kv_flush_s


def host_swap(size: float, machine: Machine, *, to_host: bool, all_busy: bool = True) -> float:
    """`size` bytes between a device and its host; `all_busy`: every device of the host copies at once.

    Small transfers reach less of the link (Calculon: 0.95, 0.9, 0.7 of it by size).
    """
    if size <= 0:
        return 0.0
    peak = machine.device.host_link(to_host=to_host, all_busy=all_busy)
    share = 1.0 if size >= 100e6 else 0.9 / 0.95 if size >= 10e6 else 0.7 / 0.95
    return size / (peak * machine.calibration.constants.host_link * share)


def exposed(transfer: float, compute: float) -> float:
    """What of a transfer is not hidden behind computing that runs at the same time."""
    return max(0.0, transfer - compute)


def controller(size: float, ranks: int, bytes_per_s: float, call_s: float) -> float:
    """One controller that hands a batch of `size` bytes to `ranks` ranks, one call each.

    Sources: cann-recipes-train measured starts 57 and 73 s apart for 256 dies this way, and below 1 and 5 s when
    devices exchange the batch among themselves.
    """
    return size / bytes_per_s + ranks * call_s


def packed_bytes(tokens: float, fields: int, bytes_per_field: int = 4) -> float:
    """A batch without padding: so many per-token fields."""
    return tokens * fields * bytes_per_field


def padding_saved(mean_tokens: float, longest: float) -> float:
    """The share of the bytes that packing saves: 1 - mean/longest."""
    return 1.0 - mean_tokens / longest if longest > 0 else 0.0
