"""The batches of published runs, and what is assumed of them, alike for every row."""

from __future__ import annotations

from benchmarks.validation.runs import Run
from rlflow.cost.lengths import Fixed, Lengths, Lognormal
from rlflow.cost.stages import Workload

SIGMA = 0.75
"""Deviation of the logarithm of response lengths before they are cut off, half of its variance the prompt's."""
PROMPT = 128.0
"""Tokens of a prompt where a row does not say."""


def limit_of(run: Run) -> int | None:
    """Tokens at which a response is cut off."""
    most = run.count("max_response_tokens")
    if most is not None:
        return most
    whole = run.count("max_sequence_tokens")
    return None if whole is None else whole - int(prompt_of(run))


def prompt_of(run: Run) -> float:
    """Mean tokens of a prompt."""
    given = run.number("mean_prompt_tokens")
    return PROMPT if given is None else given


def workload_of(run: Run, mean_response: float | None = None) -> Workload | None:
    """The batch of one step; `mean_response` where the row has none. None where it cannot be told.

    Micro-batches are packed up to the longest sequence times the size that the row gives.
    """
    prompts, samples, limit = run.count("prompts_per_step"), run.count("samples_per_prompt"), limit_of(run)
    mean = run.number("mean_response_tokens") or mean_response
    if prompts is None or samples is None or limit is None or mean is None:
        return None
    prompt = prompt_of(run)
    response: Lengths = Lognormal.of_mean(mean, limit, SIGMA) if mean < limit else Fixed(limit)
    longest = run.count("max_sequence_tokens") or int(prompt) + limit
    budget = (run.size("train_layout", "mbs") or 1) * longest
    updates = run.said("train_layout", r"mini-batch (\d+) prompts") or run.said("note", r"training batch of (\d+) seq")
    minibatch = 0
    if updates:
        minibatch = updates * samples if "mini-batch" in run.text["train_layout"] else updates
    return Workload(prompts, Fixed(prompt), response, samples=samples, microbatch_tokens=budget, minibatch=minibatch)
