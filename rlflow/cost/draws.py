"""Lengths drawn from distributions, with common random numbers.

A length depends on the seed, the name of the stream, the step, the prompt and the sample, and on nothing else. So two
plans, or two runs in another order, get the same lengths, and their difference is not noise. To let lengths drift while
a model learns, sample a step from `Lognormal.scaled` with the same seed.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from math import exp, floor
from statistics import NormalDist

from rlflow.cost.errors import WorkloadError
from rlflow.cost.lengths import Fixed, Lengths, Lognormal, Mixture, Trace

_WORD = (1 << 64) - 1
_deviate = NormalDist().inv_cdf
_KIND, _PART, _ROUNDING = (1 << 60) + 1, (1 << 60) + 2, (1 << 60) + 3
"""Keys that are no number of a sample."""


@dataclass(frozen=True, slots=True)
class LengthSampler:
    """WorkloadError for a distribution that is not one of `rlflow.cost.lengths`: how its samples depend on their prompt
    would not be known."""

    lengths: Lengths
    seed: int
    stream: str = "response"
    """Streams of different names are independent."""
    _state: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.lengths)
        object.__setattr__(self, "_state", _state_of(self.seed, self.stream))

    def tokens(self, step: int, prompt: int, sample: int = 0) -> int:
        """At least 1. A fraction is rounded up as often as it is large, which leaves the mean as it is."""
        common = _mix(_mix(self._state, step), prompt)
        return _tokens(self.lengths, common, _mix(common, sample))

    def group(self, step: int, prompt: int, samples: int) -> list[int]:
        """Of all samples of a prompt."""
        common = _mix(_mix(self._state, step), prompt)
        return [_tokens(self.lengths, common, _mix(common, sample)) for sample in range(samples)]


def chance(seed: int, stream: str, number: int) -> float:
    """A number from 0 to 1 that depends on nothing else."""
    return _uniform(_mix(_state_of(seed, stream), number))


def _check(lengths: Lengths) -> None:
    if isinstance(lengths, Mixture):
        for _, part in lengths.parts:
            _check(part)
    elif not isinstance(lengths, Fixed | Lognormal | Trace):
        raise WorkloadError(f"lengths of the kind {type(lengths).__name__} cannot be drawn")


def _tokens(lengths: Lengths, common: int, own: int) -> int:
    return max(1, floor(_length(lengths, common, own) + _uniform(_mix(own, _ROUNDING))))


def _length(lengths: Lengths, common: int, own: int) -> float:
    """`common` is what the samples of a prompt share, `own` what they do not."""
    match lengths:
        case Lognormal(mu, between, within, limit):
            logarithm = mu
            if between:
                logarithm += between * _deviate(_uniform(common))
            if within:
                logarithm += within * _deviate(_uniform(own))
            return min(limit, exp(min(logarithm, 700.0)))  # beyond it exp overflows
        case Trace(tokens, 1):
            return tokens[int(_uniform(own) * len(tokens))]
        case Trace(tokens, group):
            first = int(_uniform(common) * (len(tokens) // group)) * group
            return tokens[first + int(_uniform(own) * group)]
        case Mixture(parts):
            # Parts of no weight are never found: the sums before and after them are equal.
            ends = list(accumulate(weight for weight, _ in parts))
            index = bisect_right(ends, _uniform(_mix(common, _KIND)) * ends[-1], hi=len(ends) - 1)
            return _length(parts[index][1], _mix(common, _PART), own)
        case Fixed(tokens):
            return tokens
    raise AssertionError(lengths)  # `_check` knows them all


@lru_cache(maxsize=256)
def _state_of(seed: int, stream: str) -> int:
    return int.from_bytes(blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest(), "little")


def _mix(state: int, key: int) -> int:
    """64 bits that look random, of a state and a key (SplitMix64: Steele, Lea and Flood 2014)."""
    z = (state + (key + 1) * 0x9E3779B97F4A7C15) & _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31


def _uniform(state: int) -> float:
    """In the open interval from 0 to 1: the middles of 2^52 equal parts."""
    return ((state >> 12) + 0.5) * 2.0**-52
