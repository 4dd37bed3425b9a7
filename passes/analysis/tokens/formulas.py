"""Closed forms for one training loop: staleness, its period, and the largest bound that still helps.

The loop is a cycle of serial stages, each in a pool of its own; its tokens are the batches in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

from rlflow.passes.analysis.tokens.graph import Seconds


def age_at(step: int, tokens: int) -> int:
    """The age in steps of the batch that step `step` (from 0) trains on, with so many tokens on the training loop.

    Along edges that keep their order firing k takes what firing k - tokens made, and initial tokens are version 0: the
    age is min(step, tokens - 1). Raises ValueError for a negative step or fewer tokens than one.
    """
    if step < 0 or tokens < 1:
        raise ValueError(f"step {step} with {tokens} tokens: steps count from 0, and a loop without a token is dead")
    return min(step, tokens - 1)


def loop_period(durations: Sequence[Seconds], staleness: int, capacities: Sequence[int | None] = ()) -> Fraction:
    """Seconds per step of the loop with `staleness` + 1 tokens.

    max of the slowest stage, (duration of both sides) / capacity of each buffer, and the whole loop / (staleness + 1).
    `capacities[i]` is that of the buffer behind stage i, None for no limit. Where every buffer has a limit the free
    places travel backwards round the loop: whole loop / (sum of capacities - tokens) as well. Raises ValueError for
    no stage, a negative staleness, a capacity below one, or buffers that leave no free place.
    """
    exact = [Fraction(seconds) for seconds in durations]
    limits = list(capacities) or [None] * len(exact)
    tokens = staleness + 1
    if not exact or staleness < 0 or len(limits) != len(exact):
        raise ValueError(f"{len(exact)} stages, {len(limits)} buffers and staleness {staleness} are not a loop")
    whole = sum(exact, Fraction(0))
    ratios = [*exact, whole / tokens]
    for i, capacity in enumerate(limits):
        if capacity is not None:
            if capacity < 1:
                raise ValueError(f"buffer {i} has a capacity of {capacity}; it needs at least 1")
            ratios.append((exact[i] + exact[(i + 1) % len(exact)]) / capacity)
    known = [capacity for capacity in limits if capacity is not None]
    if len(known) == len(limits):
        if sum(known) <= tokens:
            raise ValueError(f"buffers for {sum(known)} tokens are full with {tokens}: nothing can move")
        ratios.append(whole / (sum(known) - tokens))
    return max(ratios)


def least_useful_bound(durations: Sequence[Seconds]) -> int:
    """The smallest staleness at which the loop is as fast as its slowest stage: ceil(sum / max) - 1.

    A larger bound makes samples older and nothing faster. Raises ValueError for no stage.
    """
    exact = [Fraction(seconds) for seconds in durations]
    if not exact:
        raise ValueError("a loop has at least one stage")
    slowest = max(exact)
    return ceil(sum(exact) / slowest) - 1 if slowest else 0
