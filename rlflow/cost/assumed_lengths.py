"""Lengths that are assumed where nobody states them, and responses drawn so that every plan of a flow gets the same."""

from __future__ import annotations

from collections.abc import Callable

from rlflow.cost.draws import LengthSampler
from rlflow.cost.lengths import Fixed, Lengths, Lognormal
from rlflow.cost.stated_lengths import StatedLengths
from rlflow.plan_decisions import EngineEstimate

PROMPT_TOKENS = 256
"""Assumed length of a prompt where its data do not say (`prompt_tokens`), and the context leaves room for it."""
MEAN_SHARE = 0.25
"""Assumed mean of a response as a share of `max_new`, where its stage does not say (`mean_new`)."""


def assumed_mean(mean_new: float | None, max_new: int) -> float:
    """Tokens of a response on average; `mean_new` is what the stage states."""
    return max(1.0, max_new * MEAN_SHARE) if mean_new is None else float(mean_new)


def stated_lengths(mean_new: float | None, max_new: int) -> Lengths:
    """Of the responses of a stage: lognormal and cut off at `max_new`, or all of that length where it is short."""
    mean = assumed_mean(mean_new, max_new)
    return Lognormal.of_mean(mean, max_new) if max_new > 4 and mean < max_new else Fixed(max_new)


def assumed_lengths(facts: EngineEstimate) -> Lengths:
    """The distribution that the estimate of the stage assumes."""
    if facts.mean_new < facts.max_new:
        return StatedLengths(facts.mean_new, facts.sigma, facts.prompt_share).of(facts.max_new)
    return Fixed(facts.max_new)


def lengths_of(lengths: Lengths, seed: int, stage: str) -> Callable[[int, int], int]:
    """(prompt, sample of the prompt) to tokens.

    Prompts are numbered from the start of the run, so that plans with batches of other sizes and with other rules of
    admission draw the same lengths.
    """
    sampler = LengthSampler(lengths, seed, stage)
    return lambda prompt, sample: sampler.tokens(0, prompt, sample)
