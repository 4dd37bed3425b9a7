"""What a simulation of a generation engine needs to know: its step time, its cache, the requests that it gets."""

from __future__ import annotations

from collections.abc import Callable

from rlflow.ir.decisions import Engine
from rlflow.ir.flow import Node
from rlflow.passes.analysis.costs import Costs, workload

_SPLITS = 8
"""Batch sizes between two powers of two at which a band may end."""
_NEAR = 0.002
"""How far a step time may be from its band, as a share of it."""


def engine_of(costs: Costs, node: Node, memory_bytes: int | None) -> Engine | None:
    """The engines of a generate stage where it is placed; None where something is not known.

    `memory_bytes` is what an engine may take of a device. Raises CostError for a layout that does not fit.
    """
    from dataclasses import replace

    from rlflow.cost.decode import decode_step, prefill_flops
    from rlflow.cost.generation import engine_memory, lock_step
    from rlflow.cost.groups import Group
    from rlflow.cost.stages import EngineOptions

    placement, work = node.placement, costs.work(node)
    if placement is None or placement.layout is None or work is None:
        return None
    layout, name = placement.layout, getattr(node.op, "model", "")
    machine, model = costs.machine(costs.flow.pools[placement.pool]), costs.model(name)
    if machine is None or model is None:
        return None
    if memory_bytes is not None:
        machine = replace(machine, memory_bytes=memory_bytes)
    precision = costs.precision(name)
    options = EngineOptions(precision=precision, memory_share=1.0)
    load = workload(work)
    step = decode_step(model, layout, machine, precision=precision, skew=options.skew)
    _, cache = engine_memory(model, layout, machine, load, options)
    rate = machine.flop_per_s * machine.calibration.constants.prefill_flops * layout.tp * layout.pp
    reduce = 0.0
    if layout.tp > 1:
        size = options.prefill_tokens * model.hidden * 2  # bytes of a 16-bit activation
        reduce = 2 * model.layers * Group(layout.tp).all_reduce(size, machine) / options.prefill_tokens
    return Engine(
        replicas=layout.dp * layout.cp,
        lock_step=lock_step(layout),
        slots=options.slots,
        kv_tokens=max(cache.tokens, load.longest),
        prompt_tokens=work.prompt_tokens,
        max_new=work.max_new,
        mean_new=_short(max(1.0, load.response.limited(load.response.maximum, 1))),
        bands=tuple(bands_of(lambda b: step.seconds(b, 0.0), options.slots)),
        token_s=_short(step.kv_token),
        prefill_token_s=_short((prefill_flops(model, 1, 0, 0) - prefill_flops(model, 0, 0, 0)) / rate + reduce),
        prefill_square_s=_short((prefill_flops(model, 0, 1, 0) - prefill_flops(model, 0, 0, 0)) / rate),
        prefill_context_s=_short((prefill_flops(model, 0, 0, 1) - prefill_flops(model, 0, 0, 0)) / rate),
        prefill_tokens=options.prefill_tokens,
    )


def bands_of(seconds: Callable[[int], float], slots: int) -> list[tuple[int, float, float]]:
    """(largest batch, seconds, seconds a request) of bands of batch sizes: chords of the step time, exact at both ends.

    Every band reaches as far as its chord is right between them.
    """
    sizes: set[int] = {slots}
    power = 1
    while power < slots:
        sizes.update(power + power * i // _SPLITS for i in range(_SPLITS))
        power *= 2
    ends = sorted(size for size in sizes if size <= slots)
    known = [0.0, *(seconds(b) for b in range(1, slots + 1))]
    found: list[tuple[int, float, float]] = []
    at = 0
    while at < len(ends):
        first = found[-1][0] + 1 if found else 1
        band = _chord(known, first, ends[at])
        while at + 1 < len(ends):
            longer = last, fixed, each = _chord(known, first, ends[at + 1])
            if any(abs(fixed + each * b - known[b]) > _NEAR * known[b] for b in range(first, last)):
                break
            band, at = longer, at + 1
        found.append(band)
        at += 1
    return [(last, _short(fixed), _short(each)) for last, fixed, each in found]


def _chord(seconds: list[float], first: int, last: int) -> tuple[int, float, float]:
    low, high = seconds[first], seconds[last]
    slope = (high - low) / (last - first) if last > first else 0.0
    if low - slope * first < 0:  # convex near the kink where computing takes over: the ray to the upper end is above
        return last, 0.0, high / last
    return last, low - slope * first, slope


def _short(seconds: float) -> float:
    """Six digits: the plan is read by people, and the model is not better."""
    return float(f"{seconds:.6g}")
