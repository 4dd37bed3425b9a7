"""What an engine replica is: how long its steps take, how much runs at once, and what fits its cache."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

from rlflow.backends.simulator.engine_messages import EngineError


class StepTime(Protocol):
    """tau(b, K) = a + c_b b + c_K K seconds for a step of b requests that hold K tokens, as `DecodeStep` of
    `rlflow.cost.decode` has it."""

    def affine(self, b: float) -> tuple[float, float, float]:
        """(a, c_b, c_K) that hold at b."""
        ...


@dataclass(frozen=True, slots=True)
class Band:
    """Coefficients for up to `requests` requests."""

    requests: int
    fixed: float
    request: float
    token: float


@dataclass(frozen=True, slots=True)
class BandedStep:
    """Coefficients by bands of b, as captured graphs make them. The last band holds beyond its end too."""

    bands: tuple[Band, ...]

    def __post_init__(self) -> None:
        limits = [band.requests for band in self.bands]
        if not limits or limits != sorted(set(limits)):
            raise EngineError("bands end at ascending numbers of requests")
        if any(min(band.fixed, band.request, band.token) < 0 for band in self.bands):
            raise EngineError("the coefficients of a step are at least 0")

    def affine(self, b: float) -> tuple[float, float, float]:
        index = bisect_left(self.bands, b, key=lambda band: band.requests)
        band = self.bands[min(index, len(self.bands) - 1)]
        return band.fixed, band.request, band.token


@dataclass(frozen=True, slots=True)
class ScaledStep:
    """All seconds of another step time `factor` times: 1/speed-up of speculative decoding, a slower machine."""

    step: StepTime
    factor: float

    def affine(self, b: float) -> tuple[float, float, float]:
        fixed, request, token = self.step.affine(b)
        return fixed * self.factor, request * self.factor, token * self.factor


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds that computing the tokens from x to y of a context adds to a step: token (y - x) + square (y^2 - x^2).

    The squares are attention to all earlier tokens; they make the sum over chunks equal to one pass over the whole.
    """

    token: float
    square: float = 0.0
    context: float = 0.0
    """Once a context, in the step that completes it: its head."""

    def __post_init__(self) -> None:
        if min(self.token, self.square, self.context) < 0:
            raise EngineError("the costs of prefill are at least 0")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine replica, or `ranks` of them in lock step."""

    step: StepTime
    slots: int
    """Requests that run at once, of a rank."""
    kv_blocks: int | None = None
    """Blocks of the cache of a rank. None: any number."""
    block: int = 1
    """Tokens of a block."""
    spare_blocks: int = 0
    """That admission leaves free while requests run, so that new ones are not thrown out at once (vLLM's watermark)."""
    expected: int = 0
    """Tokens of a response that admission reckons with: while requests run, another is let in only if the cache has
    room also for what it and they still lack of so many. 0: what is there now decides, as in vLLM, so that a full cache
    throws out and computes again. SGLang reckons with a share of the longest response (`new_token_ratio`)."""
    prefill: PrefillCost | None = None
    """None: contexts cost nothing and are there at once."""
    step_tokens: int | None = None
    """Tokens of a step of a rank: one for each request that decodes, the rest for prefill in chunks. None: any number.
    """
    mixed: bool = True
    """Decoding goes on in steps with prefill; otherwise it waits for them."""
    shared_prefix: bool = True
    """Full blocks of a prompt are computed and kept once for the requests of its group that run at the same time."""
    ranks: int = 1
    """Data-parallel attention before common experts: all ranks take the step of the slowest, idle ones one of b = 0."""

    def __post_init__(self) -> None:
        if min(self.slots, self.block, self.ranks) < 1 or (self.kv_blocks is not None and self.kv_blocks < 1):
            raise EngineError("an engine has at least one slot, rank and block of at least one token")
        if min(self.spare_blocks, self.expected) < 0:
            raise EngineError("spare blocks and expected tokens are at least 0")
        if self.step_tokens is not None:
            if self.prefill is None:
                raise EngineError("a limit on the tokens of a step needs the costs of prefill")
            if self.step_tokens < self.slots:
                raise EngineError(f"a step of {self.step_tokens} tokens cannot serve {self.slots} slots")

    def shared(self, prompt: int) -> int:
        """Tokens of a prompt that its group shares: full blocks, without the last token, which each computes itself."""
        return (prompt - 1) // self.block * self.block if prompt else 0

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)
