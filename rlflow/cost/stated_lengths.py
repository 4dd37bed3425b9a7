"""Lengths of responses that a person states, as `--lengths` reads them."""

from __future__ import annotations

import re

from rlflow.cost.errors import WorkloadError
from rlflow.cost.lengths import Fixed, Lengths, Lognormal
from rlflow.values import dataclass

FORMS = "lognormal(MEAN, SIGMA), lognormal(MEAN, SIGMA, PROMPT_SHARE) or fixed(TOKENS)"
_CALL = re.compile(r"\s*(lognormal|fixed)\s*\(([^()]*)\)\s*")
PROMPT_SHARE = 0.5
"""Of the variance of the logarithm, what the samples of a prompt have in common, where nobody states it."""


@dataclass(frozen=True, slots=True)
class StatedLengths:
    """A distribution but for its limit, which is the `max_new` of the stage that it is for."""

    mean: float
    """tokens, after the cut at the limit"""
    sigma: float = 0.0
    """Of the logarithm, before the cut; 0: all have the mean."""
    prompt_share: float = PROMPT_SHARE

    def of(self, max_new: int) -> Lengths:
        """WorkloadError for a mean that does not fit."""
        if self.sigma:
            return Lognormal.of_mean(self.mean, max_new, self.sigma, self.prompt_share)
        if not 1 <= self.mean <= max_new:
            raise WorkloadError(f"a length of {self.mean:g} tokens is not from 1 to the limit of {max_new}")
        return Fixed(self.mean)


def read_lengths(text: str) -> StatedLengths:
    """WorkloadError for what is none of `FORMS`."""
    found = _CALL.fullmatch(text)
    try:
        numbers = [float(number) for number in found[2].split(",")] if found else []
    except ValueError:
        numbers = []
    if found is None or len(numbers) not in ((1,) if found[1] == "fixed" else (2, 3)):
        raise WorkloadError(f"`{text}` is not {FORMS}")
    stated = StatedLengths(*numbers)
    # NaN is in no range.
    if not 1 <= stated.mean < 1e9 or not 0 <= stated.sigma <= 10 or not 0 <= stated.prompt_share <= 1:
        raise WorkloadError(f"`{text}`: a mean of at least 1 token, a sigma from 0 to 10, a share from 0 to 1")
    return stated
