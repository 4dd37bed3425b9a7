"""Pipeline schedules: bubble, copies of parameters, micro-batches in flight.

F and B are the forward and the full backward pass of one micro-batch on one rank (all its virtual stages), W the part
of B that makes the gradients of the weights. Sources: 1F1B and interleaved, Narayanan et al. 2021 (arXiv 2104.04473);
zero bubble, Qi et al. 2023 (arXiv 2401.10241); V schedules, Qi et al. 2024 (arXiv 2405.15362); DualPipe, DeepSeek-V3
(arXiv 2412.19437) and its repository.
"""

from __future__ import annotations

from typing import Literal, get_args

from rlflow.cost.errors import LayoutError, UnknownFactError

PipelineSchedule = Literal["1f1b", "interleaved", "zb1p", "zb2p", "zbv", "v-half", "v-min", "dualpipe", "dualpipev"]
SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)


def schedule_of(vp: int) -> PipelineSchedule:
    """The schedule that a layout asks for by its virtual stages."""
    return "interleaved" if vp > 1 else "1f1b"


def bubble_seconds(
    schedule: PipelineSchedule, p: int, forward: float, backward: float, weight: float = 0.0, *, v: int = 1
) -> float:
    """Idle seconds of a rank in one batch, when all ranks are equal.

    `weight` <= `backward` is needed for the zero-bubble and DualPipe schedules. An overlapped pair F&B is taken as long
    as F and B one after the other. UnknownFactError for the V schedules whose bubble has no published closed form.
    """
    if p <= 1:
        return 0.0
    if schedule == "1f1b":
        return (p - 1) * (forward + backward)
    if schedule == "interleaved":
        return (p - 1) * (forward + backward) / v
    if schedule == "zb1p":
        return max(0.0, (p - 1) * (forward + backward - 2 * weight))
    if schedule in ("zb2p", "zbv"):
        return max(0.0, (p - 1) * (forward + backward - 3 * weight))
    if schedule in ("dualpipe", "dualpipev"):
        # The V form has two stages on each of p/2 devices: p counts its stages.
        return max(0.0, (p / 2 - 1) * (forward + 2 * backward - 3 * weight))
    raise UnknownFactError(f"the pipeline schedule `{schedule}`", "bubble")


def parameter_copies(schedule: PipelineSchedule) -> int:
    """How often a rank holds the parameters of one stage."""
    return 2 if schedule == "dualpipe" else 1


def in_flight(schedule: PipelineSchedule, p: int, m: int, *, v: int = 1, stage: int = 0) -> float:
    """Micro-batches whose activations a rank holds at once, in units of all its layers; at most m.

    The zero-bubble schedules keep activations until W has run, so every rank may hold as many as the first.
    """
    if schedule == "1f1b":
        held = float(p - stage)
    elif schedule == "interleaved":
        # Chunks before the first backward pass, as Megatron-LM warms up; p (1 + (p - 1)/(p v)) on the first rank.
        held = (2 * (p - stage - 1) + (v - 1) * p + 1) / v
    elif schedule in ("dualpipe", "dualpipev"):
        held = float(p + 1)
    else:
        held = p * _OF_1F1B[schedule]
    return min(held, float(m))


_OF_1F1B = {"zb1p": 1.0, "zb2p": 2.0, "zbv": 1.0, "v-half": 1 / 2, "v-min": 1 / 3}


def check_schedule(schedule: PipelineSchedule, p: int, m: int, v: int) -> None:
    """LayoutError where a schedule cannot run so many micro-batches."""
    if schedule == "interleaved" and p > 1 and m % p:
        raise LayoutError(f"the interleaved schedule needs a multiple of pp {p} micro-batches, not {m}")
    if schedule == "dualpipe" and (p % 2 or m % 2 or m < 2 * p):
        raise LayoutError(f"DualPipe needs even pp and an even number of at least 2 pp micro-batches, not pp {p}, {m}")
    if schedule != "interleaved" and v > 1:
        raise LayoutError(f"the schedule `{schedule}` has no {v} virtual stages to choose")
