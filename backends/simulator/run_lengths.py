"""Lengths of responses, drawn so that every plan of a flow gets the same ones."""

from __future__ import annotations

from collections.abc import Callable

from rlflow.cost.length_sampler import LengthSampler
from rlflow.cost.lengths import Fixed, Lengths, Lognormal
from rlflow.plan_decisions import EngineEstimate


def assumed_lengths(facts: EngineEstimate) -> Lengths:
    """The distribution that the estimate of the stage assumes."""
    if facts.mean_new < facts.max_new:
        if not facts.sigma:
            return Fixed(facts.mean_new)
        return Lognormal.of_mean(facts.mean_new, facts.max_new, facts.sigma, facts.prompt_share)
    return Fixed(facts.max_new)


def lengths_of(facts: EngineEstimate, seed: int, stage: str) -> Callable[[int, int], int]:
    """(prompt, sample of the prompt) to tokens, from the distribution that the estimate of the stage assumes.

    Prompts are numbered from the start of the simulation, so that plans with batches of other sizes and with other
    rules of admission draw the same lengths.
    """
    sampler = LengthSampler(assumed_lengths(facts), seed, stage)
    return lambda prompt, sample: sampler.tokens(0, prompt, sample)
